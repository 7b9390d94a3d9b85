# SPDX-License-Identifier: Apache-2.0
"""`flownpu doctor` on made-up machines: XRT that is missing, too old, incomplete, or at another place."""

import subprocess

import pytest

from flownpu.doctor.checks import Check, Status
from tests.cli.doctor.machines import PPA, RELEASES, UPGRADE

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
def test_npu_without_xrt_is_noted(machine, release, remedy):
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
def test_missing_backports_are_added_from_machines_mirror(machine, file, text, added):
    """The remedy is run with the made-up machine's /etc, without sudo, and with an apt that does nothing."""
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


def test_configured_backports_are_not_added_again(machine):
    machine.ready()
    machine.release(RELEASES["trixie"])
    machine.file("etc/apt/sources.list", f"# {ONE_LINE.replace('updates', 'backports')}\n{ONE_LINE}")
    assert machine.checks()["xrt"].remedy.startswith("sed -n")  # only a comment names them
    machine.file("etc/apt/sources.list", ONE_LINE.replace("updates", "backports"))
    assert machine.checks()["xrt"].remedy == TRIXIE_BACKPORTS


def test_xrt_found_by_loader_elsewhere_is_good(machine):
    machine.ready()
    machine.xrt(folder="opt/own/lib")
    assert machine.checks()["xrt"].found == "not installed; the npu device needs it"
    machine.file(
        "proc/self/maps", "7f3a0000-7f3b0000 r-xp 00000000 08:01 42    /opt/own/lib/libxrt_coreutil.so.2.25.00"
    )
    assert machine.checks()["xrt"] == Check("xrt", Status.GOOD, "XRT 2.25 in /opt/own/lib")
    assert machine.checks(plugin=None)["xrt"].status is Status.NOTE


def test_xrt_too_old_is_bad(machine):
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
def test_xrt_without_npu_part_or_core_is_bad(machine, present, missing):
    machine.ready()
    machine.xrt(*present)
    check = machine.checks()["xrt"]
    assert check.status is Status.BAD
    assert check.found == f"XRT 2.25 in /usr/lib/x86_64-linux-gnu, but {missing}"
    assert check.remedy == "sudo apt install libxrt-npu2"


def test_xrt_of_two_versions_is_bad(machine):
    machine.ready()
    machine.xrt("coreutil", "core")
    machine.xrt("driver_xdna", version="2.21.75")
    check = machine.checks()["xrt"]
    assert check.status is Status.BAD
    assert check.found.endswith("its part for NPUs, libxrt_driver_xdna.so.2, is of XRT 2.21")


def test_flownpu_without_xrt_plugin_is_noted(machine):
    machine.ready()
    machine.xrt()
    check = machine.checks(plugin=None)["xrt"]
    assert check.status is Status.NOTE
    assert "was built without XRT's headers" in check.found
    assert check.remedy.startswith("sudo apt install libxrt-dev && pip install")


def test_xrt_not_found_by_loader_is_bad(machine):
    machine.ready()
    machine.xrt(folder="opt/xilinx/xrt/lib")
    said = "libxrt_coreutil.so.2: cannot open shared object file: No such file or directory"
    check = machine.checks(plugin=said)["xrt"]
    assert check.status is Status.BAD
    assert check.found == f"XRT 2.25 in /opt/xilinx/xrt/lib, which the loader does not look into: {said}"
    assert check.remedy == "source /opt/xilinx/xrt/setup.sh"


def test_xrt_unfit_for_plugin_is_bad(machine):
    machine.ready()
    machine.xrt()
    check = machine.checks(plugin="libflownpu_xrt.so: undefined symbol: _ZN3xrt3ext2boC1E")["xrt"]
    assert check.status is Status.BAD
    assert "undefined symbol" in check.found
    assert check.remedy.startswith("pip install --force-reinstall")
