# SPDX-License-Identifier: Apache-2.0
"""`flownpu doctor` on machines that are made up."""

import json
import sys

import pytest

import flownpu.diagnosis
import flownpu.npu_diagnosis
from flownpu.checks import Check, Host, Status
from flownpu.diagnosis import diagnose_software
from flownpu.machine import cpu_isa, describe_machine
from flownpu.npu_artifacts import build_artifacts
from flownpu.npu_diagnosis import diagnose_npu


class MadeUp:
    """A machine whose /dev, /proc and /sys are below a folder."""

    def __init__(self, root):
        self.root = root

    def file(self, path, text=""):
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(f"{text}\n")

    def npu(self, device="0x17f0", vendor="0x1022"):
        self.file("sys/bus/pci/devices/0000:c5:00.1/vendor", vendor)
        self.file("sys/bus/pci/devices/0000:c5:00.1/device", device)

    def driver(self):
        self.file("sys/module/amdxdna/version", "2.21")

    def node(self, name="accel0", vendor="0x1022"):
        self.file(f"dev/accel/{name}")
        self.file(f"sys/class/accel/{name}/device/vendor", vendor)
        self.file(f"sys/class/accel/{name}/device/fw_version", "1.0.0.63")

    def checks(self, *, may_use=True, memlock=-1, plugin=True):
        host = Host(root=self.root, may_use=lambda _: may_use, memlock=lambda: memlock, has_plugin=lambda: plugin)
        return {check.name: check for check in diagnose_npu(host)}


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


def test_an_npu_without_its_driver(machine):
    machine.npu()
    check = machine.checks()["npu"]
    assert check.status is Status.BAD
    assert check.found == "XDNA2 NPU (Strix, Strix Halo, Krackan), but its driver amdxdna is not loaded"
    assert check.remedy == "sudo modprobe amdxdna"


def test_a_driver_that_made_no_device(machine):
    machine.npu(device="0x1502")
    machine.driver()
    check = machine.checks()["npu"]
    assert check.status is Status.BAD
    assert "XDNA NPU (Phoenix, Hawk Point); the driver amdxdna is loaded but made no /dev/accel/accel*" in check.found
    assert check.remedy == "sudo dmesg | grep amdxdna"


def test_no_permission_is_told_from_no_device(machine):
    machine.npu()
    machine.driver()
    machine.node()
    check = machine.checks(may_use=False)["npu"]
    assert check.status is Status.BAD
    assert check.found.endswith("at /dev/accel/accel0, which this user may not open")
    assert check.remedy.startswith('sudo usermod -aG render "$USER"')


def test_an_npu_that_is_ready(machine):
    machine.npu()
    machine.driver()
    machine.node()
    machine.file("usr/lib/x86_64-linux-gnu/libxrt_coreutil.so.2")
    checks = machine.checks()
    assert checks["npu"].status is Status.GOOD
    assert checks["npu"].found.endswith(" at /dev/accel/accel0, driver 2.21, firmware 1.0.0.63")
    assert checks["xrt"] == Check("xrt", Status.GOOD, "/usr/lib/x86_64-linux-gnu/libxrt_coreutil.so.2")
    assert "memory lock" not in checks
    built_without = machine.checks(plugin=False)["xrt"]
    assert built_without.status is Status.NOTE
    assert built_without.remedy.startswith("sudo apt install libxrt-dev && pip install")


def test_an_npu_without_xrt(machine):
    machine.npu()
    machine.node()
    assert machine.checks()["xrt"].remedy == "sudo apt install libxrt-npu2"


@pytest.mark.parametrize(("memlock", "bad"), [(8 << 20, True), (64 << 20, False), (-1, False)])
def test_the_memory_that_the_driver_locks(machine, memlock, bad):
    machine.npu()
    machine.node()
    assert ("memory lock" in machine.checks(memlock=memlock)) is bad


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


def software(monkeypatch, versions):
    """The checks where the distributions of a module are these."""
    monkeypatch.setattr("flownpu.diagnosis.module_versions", lambda module: versions.get(module, {}))
    return {check.name: check for check in diagnose_software()}


GOOD = {"onnxruntime": {"onnxruntime": "1.31.1"}, "onnxruntime_genai": {"onnxruntime-genai": "0.18.0"}}


@pytest.mark.parametrize(
    ("flavours", "found", "remedy"),
    [
        ({}, "not installed", "pip install onnxruntime"),
        (
            {"onnxruntime": "1.20.1"},
            "FlowNPU needs onnxruntime 1.27 or newer, found 1.20.1",
            "pip install --upgrade onnxruntime",
        ),
        (
            {"onnxruntime": "1.31.1", "onnxruntime-gpu": "1.31.1"},
            "onnxruntime 1.31.1, onnxruntime-gpu 1.31.1: several flavours overwrite one another",
            "pip uninstall -y onnxruntime-gpu onnxruntime && pip install onnxruntime",
        ),
    ],
)
def test_an_onnxruntime_that_does_not_do(monkeypatch, flavours, found, remedy):
    checks = software(monkeypatch, {**GOOD, "onnxruntime": flavours})
    assert checks["onnxruntime"] == Check("onnxruntime", Status.BAD, found, remedy)
    assert "registration" not in checks  # it would only fail for the same reason


def test_without_genai_only_generation_is_missing(monkeypatch):
    check = software(monkeypatch, {**GOOD, "onnxruntime_genai": {}})["onnxruntime-genai"]
    assert check.status is Status.NOTE
    assert check.remedy == 'pip install "flownpu[genai]"'


def test_a_library_that_does_not_load(monkeypatch, tmp_path):
    (tmp_path / "libflownpu_ep.so").write_bytes(b"not a library")
    monkeypatch.setattr("flownpu.diagnosis.get_library_path", lambda: str(tmp_path / "libflownpu_ep.so"))
    checks = software(monkeypatch, GOOD)
    assert checks["provider library"].status is Status.BAD
    assert "does not load" in checks["provider library"].found
    assert "registration" not in checks


def test_a_package_without_the_library(monkeypatch):
    monkeypatch.setattr(sys.modules["flownpu"], "__path__", ["/nowhere"])
    check = software(monkeypatch, GOOD)["provider library"]
    assert check.status is Status.BAD
    assert check.found == "libflownpu_ep.so is not in the flownpu package (looked in /nowhere)"


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


def test_every_bad_check_has_a_remedy():
    """The promise of the documentation, read from the source: a Check that is BAD names a remedy."""
    import ast
    import inspect

    source = "".join(inspect.getsource(module) for module in (flownpu.diagnosis, flownpu.npu_diagnosis))
    tree = ast.parse(source)
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Check"]
    bad = [call for call in calls if ast.unparse(call.args[1]) == "Status.BAD"]
    assert bad
    assert all(len(call.args) == 4 for call in bad)
