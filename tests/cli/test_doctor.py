# SPDX-License-Identifier: Apache-2.0
"""`flownpu doctor` on machines that are made up."""

import json
import resource
import subprocess

import pytest

import flownpu.doctor.diagnosis
import flownpu.doctor.npu
import flownpu.doctor.xrt
from flownpu.doctor.checks import Check, Host, Status
from flownpu.doctor.npu import (
    FULL,
    JOIN_THE_GROUP,
    MORE_LOCKED_MEMORY,
    MORE_LOCKED_MEMORY_OF_ROOT,
    TOO_OLD,
    diagnose_model,
    diagnose_npu,
)  # fmt: skip
from flownpu.machine import cpu_isa, describe_machine
from flownpu.npu.artifacts import build_artifacts


class MadeUp:
    """A machine whose /dev, /etc, /lib, /proc, /sys and /usr are below a folder."""

    def __init__(self, root):
        self.root = root
        self.file("proc/self/uid_map", "         0          0 4294967295")

    def file(self, path, text=""):
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(f"{text}\n")

    def npu(self, device="0x17f0", vendor="0x1022", revision="0x11", place="0000:c5:00.1"):
        for name, text in (("vendor", vendor), ("device", device), ("revision", revision)):
            self.file(f"sys/bus/pci/devices/{place}/{name}", text)

    def driver(self):
        self.file("sys/module/amdxdna/version", "2.21")

    def firmware(self, folder="17f0_11"):
        self.file(f"lib/firmware/amdnpu/{folder}/npu.sbin.zst")

    def node(self, name="accel0", vendor="0x1022", device="0x17f0"):
        self.file(f"dev/accel/{name}")
        for attribute, text in (("vendor", vendor), ("device", device), ("fw_version", "1.0.0.63")):
            self.file(f"sys/class/accel/{name}/device/{attribute}", text)

    def lockable(self, limit, capabilities="0000000000000000", user=1000):
        self.file("proc/self/limits", f"Max locked memory         {limit}              {limit}              bytes")
        self.file("proc/self/status", f"Name:\tpython\nUid:\t{user}\t{user}\t{user}\t{user}\nCapEff:\t{capabilities}")

    def release(self, text):
        self.file("etc/os-release", text)

    def xrt(self, *libraries, version="2.25.00", folder="usr/lib/x86_64-linux-gnu"):
        for library in libraries or ("coreutil", "core", "driver_xdna"):
            for name in (f"libxrt_{library}.so.2", f"libxrt_{library}.so.{version}"):
                self.file(f"{folder}/{name}")

    def ready(self):
        """An NPU with all it needs, but for XRT."""
        self.release(FORKY)
        self.npu()
        self.driver()
        self.firmware()
        self.node()

    def checks(self, *, may_use=True, log="", plugin=""):
        host = Host(root=self.root, may_use=lambda _: may_use, kernel_log=lambda: log, load_plugin=lambda: plugin)
        return {check.name: check for check in diagnose_npu(host)}


def debian(codename, number=""):
    return f'PRETTY_NAME="Debian GNU/Linux {number} ({codename})"\nID=debian\nVERSION_CODENAME={codename}'


FORKY = debian("forky")
# Debian unstable calls itself by the next release's name (package base-files).
RELEASES = {
    "bookworm": debian("bookworm", 12),
    "trixie": debian("trixie", 13),
    "forky": FORKY,
    "noble": 'PRETTY_NAME="Ubuntu 24.04.3 LTS"\nID=ubuntu\nID_LIKE=debian\nVERSION_CODENAME=noble',
    "mint": "ID=linuxmint\nID_LIKE='ubuntu debian'\nVERSION_CODENAME=zara\nUBUNTU_CODENAME=noble",
    "resolute": "ID=ubuntu\nID_LIKE=debian\nVERSION_CODENAME=resolute",
    "arch": "ID=arch",
    "fedora": "ID=fedora\nVERSION_ID=44",
}
UPGRADE = (
    "grep -rl bookworm /etc/apt/sources.list* | xargs -r sudo sed -i s/bookworm/trixie/g && sudo apt update && "
    "sudo apt full-upgrade"
)
PPA = "sudo add-apt-repository -y ppa:lemonade-team/stable && sudo apt install"


@pytest.fixture
def machine(tmp_path):
    return MadeUp(tmp_path)


def test_no_npu_is_nothing_broken(machine):
    assert machine.checks() == {
        "npu": Check("npu", Status.NOTE, "none in this machine; the cpu device is used"),
    }


def test_other_devices_are_no_npu(machine):
    machine.npu(device="0x17f0", vendor="0x8086")
    machine.node(vendor="0x8086")
    assert machine.checks()["npu"].found == "none in this machine; the cpu device is used"


@pytest.mark.parametrize("device", ["17f1", "17f2", "17f3", "1b0a", "1b0b", "1b0c"])
def test_an_npu_of_a_later_generation(machine, device):
    machine.npu(device=f"0x{device}")
    check = machine.checks()["npu"]
    assert check.status is Status.NOTE
    assert check.found.startswith(f"NPU of a generation after XDNA2 (PCI {device}), for which FlowNPU has no designs")
    machine.driver()
    machine.node(device=f"0x{device}")
    check = machine.checks()["npu"]
    assert check.status is Status.NOTE
    assert "at /dev/accel/accel0, for which FlowNPU has no designs" in check.found


def test_an_npu_without_its_driver(machine):
    machine.npu()
    check = machine.checks()["npu"]
    assert check.status is Status.BAD
    assert check.found == "XDNA2 NPU (Strix, Strix Halo, Krackan), but its driver amdxdna is not loaded"
    assert check.remedy == "sudo modprobe amdxdna"


@pytest.mark.parametrize(
    ("release", "remedy"),
    [
        ("bookworm", UPGRADE),
        (
            "trixie",
            "sed -n 's/trixie-updates/trixie-backports/p' /etc/apt/sources.list | sudo tee "
            "/etc/apt/sources.list.d/backports.list && sudo apt update && "
            "sudo apt install -t trixie-backports linux-image-amd64 && sudo reboot",
        ),
        ("forky", "sudo apt install linux-image-amd64 && sudo reboot"),
        ("noble", f"{PPA} amdxdna-dkms && sudo reboot"),
        ("resolute", "sudo apt install linux-generic && sudo reboot"),
        ("arch", "sudo pacman -S linux && sudo reboot"),
    ],
)
def test_a_kernel_without_the_driver(machine, release, remedy):
    machine.release(RELEASES[release])
    machine.npu()
    machine.file("proc/sys/kernel/osrelease", "6.12.9")
    machine.file("lib/modules/6.12.9/kernel/drivers/accel/ivpu/intel_vpu.ko.xz")
    check = machine.checks()["npu"]
    assert check.status is Status.BAD
    assert "but Linux 6.12.9 of " in check.found
    assert "has no driver amdxdna for it" in check.found
    assert check.remedy == remedy
    machine.file("lib/modules/6.12.9/kernel/drivers/accel/amdxdna/amdxdna.ko.xz")
    assert machine.checks()["npu"].remedy == "sudo modprobe amdxdna"


@pytest.mark.parametrize(
    ("release", "remedy"),
    [
        ("forky", "sudo apt install firmware-amd-graphics && sudo modprobe -r amdxdna && sudo modprobe amdxdna"),
        ("resolute", "sudo apt install linux-firmware && sudo modprobe -r amdxdna && sudo modprobe amdxdna"),
        ("noble", f"{PPA} amdxdna-dkms && sudo reboot"),
    ],
)
def test_a_driver_without_firmware(machine, release, remedy):
    machine.release(RELEASES[release])
    machine.npu(device="0x1502", revision="0x00")
    machine.driver()
    machine.firmware("17f0_11")  # another NPU's
    check = machine.checks()["npu"]
    assert check.status is Status.BAD
    assert check.found == (
        "XDNA NPU (Phoenix, Hawk Point); its driver amdxdna is loaded, and finds no firmware in "
        "/lib/firmware/amdnpu/1502_00"
    )
    assert check.remedy == remedy


def test_a_driver_that_does_not_take_the_firmware(machine):
    machine.release(FORKY)
    machine.npu()
    machine.driver()
    machine.firmware()
    log = (
        "[    5.1] amdxdna 0000:c5:00.1: [drm] *ERROR* aie2_check_protocol: Incompatible firmware protocol major 7 "
        "minor 2\n[    5.2] amdxdna 0000:c5:00.1: [drm] *ERROR* aie2_hw_start: firmware is not alive"
    )
    check = machine.checks(log=log)["npu"]
    assert check.status is Status.BAD
    assert "does not take the firmware in /lib/firmware/amdnpu/17f0_11 (Incompatible firmware protocol" in check.found
    assert check.remedy.startswith("sudo apt install firmware-amd-graphics && ")


def test_a_driver_that_could_not_start_the_npu(machine):
    """What else it said only the kernel's log tells, which users may not read."""
    machine.npu()
    machine.driver()
    machine.firmware()
    check = machine.checks(log="[    5.1] amdxdna 0000:c5:00.1: [drm] *ERROR* aie2_smu_init: Access power failed")[
        "npu"
    ]
    assert check.status is Status.BAD
    assert check.found.endswith("; its driver amdxdna is loaded, and could not start it")
    assert check.remedy == "sudo dmesg | grep amdxdna"


def test_no_permission_is_told_from_no_device(machine):
    machine.ready()
    check = machine.checks(may_use=False)["npu"]
    assert check.status is Status.BAD
    assert check.found.endswith("at /dev/accel/accel0, which this user may not open")
    assert check.remedy.startswith('sudo usermod -aG render "$USER"')


def test_an_npu_that_is_ready(machine):
    machine.ready()
    machine.xrt()
    checks = machine.checks()
    assert checks["npu"].status is Status.GOOD
    assert checks["npu"].found.endswith(" at /dev/accel/accel0, driver 2.21, firmware 1.0.0.63")
    assert checks["xrt"] == Check("xrt", Status.GOOD, "XRT 2.25 in /usr/lib/x86_64-linux-gnu")
    assert set(checks) == {"npu", "xrt"}


def test_two_npus(machine):
    machine.ready()
    machine.node("accel1", device="0x1502")
    host = Host(root=machine.root, may_use=lambda _: True, kernel_log=str)
    checks = list(diagnose_npu(host))
    assert [check.found for check in checks if check.name == "npu"] == [
        "XDNA2 NPU (Strix, Strix Halo, Krackan) at /dev/accel/accel0, driver 2.21, firmware 1.0.0.63",
        "XDNA NPU (Phoenix, Hawk Point) at /dev/accel/accel1, driver 2.21, firmware 1.0.0.63",
    ]
    several = next(check for check in checks if check.name == "npus")
    assert several.status is Status.NOTE
    assert several.found == "2; FlowNPU uses the first that XRT finds"


TRIXIE_BACKPORTS = "sudo apt install -t trixie-backports libxrt-npu2"


@pytest.mark.parametrize(
    ("release", "remedy"),
    [
        ("bookworm", UPGRADE),
        ("forky", "sudo apt install libxrt-npu2"),
        ("noble", f"{PPA} libxrt-npu2"),
        ("mint", f"{PPA} libxrt-npu2"),
        ("resolute", "sudo apt install libxrt-npu2"),
        ("arch", "sudo pacman -S xrt xrt-plugin-amdxdna"),
        ("fedora", "git clone --recursive https://github.com/amd/xdna-driver && "),
    ],
)
def test_an_npu_without_xrt(machine, release, remedy):
    machine.ready()
    machine.release(RELEASES[release])
    check = machine.checks()["xrt"]
    assert check.status is Status.NOTE
    assert check.found == "not installed; the npu device needs it"
    assert check.remedy.startswith(remedy)
    assert check.remedy == remedy or release == "fedora"


ONE_LINE = "deb http://mirror.example/debian trixie-updates main non-free-firmware"
STANZA = "Types: deb\nURIs: http://mirror.example/debian\nSuites: trixie trixie-updates\nComponents: main"


@pytest.mark.parametrize(
    ("file", "text", "added"),
    [
        ("sources.list", ONE_LINE, "deb http://mirror.example/debian trixie-backports main non-free-firmware"),
        ("sources.list.d/debian.sources", STANZA, "Suites: trixie trixie-updates trixie-backports"),
    ],
)
def test_backports_are_added_from_the_mirror_that_the_machine_has(machine, file, text, added):
    """The command is run, with the made-up machine's /etc for the real one and nothing for sudo and apt."""
    machine.ready()
    machine.release(RELEASES["trixie"])
    machine.file(f"etc/apt/{file}", text)
    remedy = machine.checks()["xrt"].remedy
    assert remedy.endswith(f" && sudo apt update && {TRIXIE_BACKPORTS}")
    (machine.root / "etc/apt/sources.list.d").mkdir(exist_ok=True)
    script = 'sudo() { case $1 in apt) ;; *) "$@" ;; esac; }\n' + remedy.replace("/etc/apt", f"{machine.root}/etc/apt")
    subprocess.run(["bash", "-c", script], check=True, stdout=subprocess.DEVNULL)
    texts = [found.read_text() for found in (machine.root / "etc/apt").rglob("*") if found.is_file()]
    assert any(added in text for text in texts)
    assert machine.checks()["xrt"].remedy == TRIXIE_BACKPORTS


def test_backports_that_are_there(machine):
    machine.ready()
    machine.release(RELEASES["trixie"])
    machine.file("etc/apt/sources.list", f"# {ONE_LINE.replace('updates', 'backports')}\n{ONE_LINE}")
    assert machine.checks()["xrt"].remedy.startswith("sed -n")  # only a comment names them
    machine.file("etc/apt/sources.list", ONE_LINE.replace("updates", "backports"))
    assert machine.checks()["xrt"].remedy == TRIXIE_BACKPORTS


def test_an_xrt_at_another_place_that_the_loader_finds(machine):
    machine.ready()
    machine.xrt(folder="opt/own/lib")
    assert machine.checks()["xrt"].found == "not installed; the npu device needs it"
    machine.file(
        "proc/self/maps", "7f3a0000-7f3b0000 r-xp 00000000 08:01 42    /opt/own/lib/libxrt_coreutil.so.2.25.00"
    )
    assert machine.checks()["xrt"] == Check("xrt", Status.GOOD, "XRT 2.25 in /opt/own/lib")
    assert machine.checks(plugin=None)["xrt"].status is Status.NOTE


def test_an_xrt_that_is_too_old(machine):
    machine.ready()
    machine.xrt("coreutil", "core", version="2.13.0")
    check = machine.checks()["xrt"]
    assert check.status is Status.BAD
    assert check.found == ("XRT 2.13 in /usr/lib/x86_64-linux-gnu, which is too old: XRT 2.19 or newer is needed")
    assert check.remedy == "sudo apt install libxrt-npu2"


@pytest.mark.parametrize(
    ("present", "missing"),
    [
        (("coreutil", "core"), "its part for NPUs, libxrt_driver_xdna.so.2, is missing"),
        (("coreutil", "driver_xdna"), "a library of its own, libxrt_core.so.2, is missing"),
    ],
)
def test_an_xrt_without_its_part_for_npus_or_its_core(machine, present, missing):
    machine.ready()
    machine.xrt(*present)
    check = machine.checks()["xrt"]
    assert check.status is Status.BAD
    assert check.found == f"XRT 2.25 in /usr/lib/x86_64-linux-gnu, but {missing}"
    assert check.remedy == "sudo apt install libxrt-npu2"


def test_an_xrt_of_two_versions(machine):
    machine.ready()
    machine.xrt("coreutil", "core")
    machine.xrt("driver_xdna", version="2.21.75")
    check = machine.checks()["xrt"]
    assert check.status is Status.BAD
    assert check.found.endswith("its part for NPUs, libxrt_driver_xdna.so.2, is of XRT 2.21")


def test_a_flownpu_without_its_part_for_xrt(machine):
    machine.ready()
    machine.xrt()
    check = machine.checks(plugin=None)["xrt"]
    assert check.status is Status.NOTE
    assert "was built without XRT's headers" in check.found
    assert check.remedy.startswith("sudo apt install libxrt-dev && pip install")


def test_an_xrt_that_the_loader_does_not_find(machine):
    machine.ready()
    machine.xrt(folder="opt/xilinx/xrt/lib")
    said = "libxrt_coreutil.so.2: cannot open shared object file: No such file or directory"
    check = machine.checks(plugin=said)["xrt"]
    assert check.status is Status.BAD
    assert check.found == f"XRT 2.25 in /opt/xilinx/xrt/lib, which the loader does not look into: {said}"
    assert check.remedy == "source /opt/xilinx/xrt/setup.sh"


def test_an_xrt_that_this_flownpu_was_not_built_for(machine):
    machine.ready()
    machine.xrt()
    check = machine.checks(plugin="libflownpu_xrt.so: undefined symbol: _ZN3xrt3ext2boC1E")["xrt"]
    assert check.status is Status.BAD
    assert "undefined symbol" in check.found
    assert check.remedy.startswith("pip install --force-reinstall")


LIMITED, ROOT, ALL_BUT_IT = 8 << 20, "000001ffffffffff", "000001ffffffbfff"


@pytest.mark.parametrize(
    ("limit", "capabilities", "bad"),
    [
        (LIMITED, "0000000000000000", True),
        (64 << 20, "0000000000000000", False),
        ("unlimited", "0000000000000000", False),
        (LIMITED, ROOT, False),
        (LIMITED, ALL_BUT_IT, True),
    ],
)
def test_the_memory_that_the_driver_locks(machine, limit, capabilities, bad):
    machine.ready()
    machine.lockable(limit, capabilities)
    checks = machine.checks()
    assert ("memory lock" in checks) is bad
    if bad:
        assert checks["memory lock"].found == "8192 KiB may be locked; the NPU's driver locks 64 MiB"
        assert checks["memory lock"].remedy == MORE_LOCKED_MEMORY


def test_root_of_a_container_is_bound_by_the_limit(machine):
    """The kernel asks for the capability outside of the container's users."""
    machine.ready()
    machine.lockable(LIMITED, ROOT, user=0)
    machine.file("proc/self/uid_map", "0 1000 1\n1 100000 65536")
    # What limits.conf says of everybody does not hold for root.
    assert machine.checks()["memory lock"].remedy == MORE_LOCKED_MEMORY_OF_ROOT


def test_the_limit_of_this_process_is_read():
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    lines = [line for line in Host().read("proc/self/limits").splitlines() if line.startswith("Max locked memory")]
    assert lines[0].split()[3] == ("unlimited" if soft == resource.RLIM_INFINITY else str(soft))


AVX512 = "fma f16c avx2 avx512f avx512bw avx512dq avx512vl"


@pytest.mark.parametrize(
    ("flags", "isa"),
    [
        ("sse2 avx", "generic"),
        ("avx2 fma f16c", "avx2"),
        (AVX512, "avx512"),
        (f"{AVX512} avx512_vnni", "avx512 with vnni"),
        (f"{AVX512} avx512_vnni avx512_bf16", "avx512 with vnni and bf16"),
    ],
)
def test_instruction_sets(machine, flags, isa):
    assert cpu_isa(set(flags.split())) == isa
    machine.file("proc/cpuinfo", f"processor : 0\nmodel name : Ryzen AI 9\nflags : {flags}\nprocessor : 1\nflags :")
    described = describe_machine(machine.root)
    assert (described.cpu, described.isa) == ("Ryzen AI 9", isa)


def test_a_machine_without_cpuinfo(machine):
    assert describe_machine(machine.root).isa == "generic"


def test_this_machine(flownpu):
    done = flownpu("doctor", "--json")
    report = json.loads(done.out)
    checks = {check["name"]: check for check in report["checks"]}
    for name in ("python", "onnxruntime", "onnxruntime-genai", "provider library", "registration"):
        assert checks[name]["status"] == "good", checks[name]
    assert done.code == (0 if report["ok"] else 1)


def test_what_is_broken_makes_the_command_fail(flownpu, monkeypatch):
    bad = Check("npu", Status.BAD, "[0000:c5:00.1] has no driver", "sudo modprobe amdxdna")
    monkeypatch.setattr("flownpu.cli.doctor.diagnose", lambda *_: iter([Check("python", Status.GOOD, "3.14"), bad]))
    done = flownpu("doctor")
    assert done.code == 1
    assert done.out.splitlines() == [
        "ok   python  3.14",
        "BAD  npu     [0000:c5:00.1] has no driver",
        "             mend it with: sudo modprobe amdxdna",
        "Something is broken.",
    ]
    assert json.loads(flownpu("doctor", "--json").out)["ok"] is False


def test_a_note_does_not(flownpu, monkeypatch):
    monkeypatch.setattr("flownpu.cli.doctor.diagnose", lambda *_: iter([Check("npu", Status.NOTE, "none")]))
    assert flownpu("doctor").code == 0


def test_a_model_without_artifacts(flownpu, model):
    done = flownpu("doctor", model)
    assert done.code == 1
    assert f"none for device=emulate in {model / 'artifacts' / 'emulate'}" in done.out
    assert f"mend it with: flownpu build {model} --for emulate" in done.out


def test_a_model_that_the_emulator_runs_until_its_artifacts_are_damaged(flownpu, model_copy):
    built = build_artifacts(model_copy, context=64)
    checks = {check["name"]: check for check in json.loads(flownpu("doctor", model_copy, "--json").out)["checks"]}
    assert checks["artifacts"]["status"] == checks["a token"]["status"] == "good"
    assert "1 dispatch a token" in checks["a token"]["found"]
    file = next((built.folder / "calls").glob("decode_layer*/*.words"))
    file.write_bytes(file.read_bytes()[:-8])
    done = flownpu("doctor", model_copy)
    assert done.code == 1
    assert file.name in done.out
    assert f"mend it with: flownpu build {model_copy} --for emulate" in done.out


def test_what_a_session_says_is_mended_as_on_this_machine(machine, tmp_path, monkeypatch):
    machine.ready()
    (tmp_path / "artifacts/npu2").mkdir(parents=True)
    (tmp_path / "artifacts/npu2/index.words").touch()

    def remedy(said):
        def refuse(*_args, **_options):
            raise RuntimeError(said)

        monkeypatch.setattr(flownpu.doctor.npu, "LanguageModel", refuse)
        check = list(diagnose_model(Host(root=machine.root), tmp_path, emulated=False))[-1]
        assert (check.name, check.status, check.found) == ("a token", Status.BAD, said)
        return check.remedy

    assert remedy(f"array.xclbin on NPU Strix, firmware 1.0.0.63, XRT 2.25: no; {TOO_OLD}") == (
        "sudo apt install firmware-amd-graphics && sudo modprobe -r amdxdna && sudo modprobe amdxdna, and if that "
        "changes nothing sudo apt install linux-image-amd64 && sudo reboot"
    )
    assert remedy(f"No space left on device; {FULL}").startswith("xrt-smi examine --report aie-partitions")
    assert remedy(f"Permission denied; join the group of the device file: {JOIN_THE_GROUP}") == JOIN_THE_GROUP
    said = f"Cannot allocate memory; {MORE_LOCKED_MEMORY}; as root {MORE_LOCKED_MEMORY_OF_ROOT}"
    assert remedy(said) == MORE_LOCKED_MEMORY
    machine.lockable("unlimited", user=0)
    assert remedy(said) == MORE_LOCKED_MEMORY_OF_ROOT
    assert remedy("the array did not answer") == "sudo dmesg | grep amdxdna"


def test_every_bad_check_has_a_remedy():
    """The promise of the documentation, read from the source: a Check that is BAD names a remedy."""
    import ast
    import inspect

    source = "".join(
        inspect.getsource(module) for module in (flownpu.doctor.diagnosis, flownpu.doctor.npu, flownpu.doctor.xrt)
    )
    tree = ast.parse(source)
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Check"]
    bad = [call for call in calls if ast.unparse(call.args[1]) == "Status.BAD"]
    assert bad
    assert all(len(call.args) == 4 for call in bad)
