# SPDX-License-Identifier: Apache-2.0
"""The XRT runtime over Debian's XRT, below which a double of the kernel's driver computes; no NPU has run it.

The tests in over_xrt/ run in one process for each of two drivers, those here in a process each, since XRT looks for
devices only once in a process.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.built import BUILT
from tests.npu import debian_xrt, xrt
from tests.npu.firmware import CURRENT, FIRST, Firmware
from tests.npu.machine import ROOT, Machine, require

FOLDER = ROOT / "tests/npu/over_xrt"
# "timelines", as in Linux 7: a context has a timeline, and XRT flushes caches itself.
# "own memory", as in older kernels: a request waits for a context. The driver also moves all data to and from memory of
# the array's own, so that a missing move shows.
DRIVERS = {
    "timelines": {"settings": "", "ini": ""},
    "own memory": {"settings": "timelines=0 separate=1", "ini": "[Debug]\nforce_driver_sync=true\n"},
}


@pytest.mark.parametrize("name", DRIVERS)
def test_tests_over_xrt_pass(name: str, tmp_path: Path) -> None:
    require()
    machine = Machine(tmp_path, **DRIVERS[name])  # type: ignore[arg-type]
    done = machine.python("-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--tb=short", FOLDER)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed, done.stdout
    assert int(passed[1]) > 60  # pytest collected the right folder


OPEN = """
import sys
from tests.npu.arrays import npu
try:
    print("opened", npu.open_xrt_runtime(*sys.argv[1:]).description)
except npu.DeviceError as error:
    print(error.failure, error)
"""


# The command that installs XRT depends on the machine.
INSTALL = "; `flownpu doctor` names the command that installs it here"
NO_DRIVER = {"driver": False}
NOT_STARTED = (
    "no_device .*XRT finds no NPU, though the driver amdxdna is loaded; this machine has none, or the driver could not "
    "start it, as where its firmware is missing or of another age than the driver: `flownpu doctor` tells which"
)


@pytest.mark.parametrize(
    ("machine", "without", "said"),
    [
        ({"devices": 2}, (), "opened NPU Strix, firmware 255.0.5.35, XRT 2.25"),
        (
            NO_DRIVER,
            (),
            r"no_device .*XRT finds no NPU; load the driver \(sudo modprobe amdxdna\); `flownpu doctor` tells",
        ),
        ({"devices": 0}, (), NOT_STARTED),
        (
            {},
            ["libxrt_driver_xdna"],
            r"version .*XRT has not loaded libxrt_driver_xdna.so.2 \(libxrt_driver_xdna.so.2: cannot open shared .*"
            rf"{INSTALL}",
        ),
        # Without this library the presence of an NPU is unknown.
        ({"devices": 0}, ["libxrt_driver_xdna"], rf"version .*XRT has not loaded libxrt_driver_xdna.so.2 .*{INSTALL}"),
        (NO_DRIVER, ["libxrt_driver_xdna"], rf"version .*XRT has not loaded libxrt_driver_xdna.so.2 .*{INSTALL}"),
        ({}, ["libxrt_core.so"], rf"version .*No such library .*/libxrt_core\.so\.2.*{INSTALL}"),
        ({}, ["libxrt_coreutil"], rf"version .*XRT is not installed \(libxrt_coreutil.so.2: .*{INSTALL}"),
    ],
)
def test_machine_state_is_named(machine: dict[str, Any], without: list[str], said: str, tmp_path: Path) -> None:
    require()
    done = Machine(tmp_path, **machine).python("-c", OPEN, without=without)
    assert done.returncode == 0, done.stderr
    assert re.match(said, done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("firmware", "linux", "said"),
    [
        (FIRST, "6.19.8", "opened NPU Strix, firmware 1.0.0.63, XRT 2.25"),
        (CURRENT, "6.19.8", NOT_STARTED),
        (Firmware("1.0.0.5", (6, 1)), "7.3.4", NOT_STARTED),
        (None, "7.3.4", NOT_STARTED),
    ],
)
def test_firmware_and_driver_versions_are_reported(
    firmware: Firmware | None, linux: str, said: str, tmp_path: Path
) -> None:
    """The driver does not start an NPU whose firmware it does not take: there is no device file."""
    require()
    done = Machine(tmp_path, firmware=firmware, linux=linux).python("-c", OPEN)
    assert done.returncode == 0, done.stderr
    assert re.match(said, done.stdout.splitlines()[-1])


def test_missing_library_of_xrt_is_named(tmp_path: Path) -> None:
    require()
    plugin = tmp_path / xrt.PLUGIN.name
    plugin.write_bytes(xrt.PLUGIN.read_bytes().replace(b"libgcc_s.so.1", b"libgcc_x.so.1"))
    done = Machine(tmp_path).python("-c", OPEN, plugin)
    said = rf"version .*XRT needs a library more \(libgcc_x\.so\.1: cannot open shared object file.*{INSTALL}"
    assert re.match(said, done.stdout.splitlines()[-1])


def test_xrt_and_sysfs_say_same_of_firmware(tmp_path: Path) -> None:
    """XRT's own program asks the driver, the runtime reads sysfs."""
    require()
    machine = Machine(tmp_path, firmware=CURRENT)
    root = debian_xrt.FOLDER / "root/usr"
    done = subprocess.run(
        debian_xrt.command([root / "bin/xrt-smi", "examine"]),
        env=os.environ | machine.variables() | {"XILINX_XRT": str(root)},
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert re.search(r"NPU Firmware Version *: 1\.1\.2\.64\n", done.stdout), done.stdout + done.stderr
    opened = machine.python("-c", OPEN)
    assert opened.stdout.splitlines()[-1] == "opened NPU Strix, firmware 1.1.2.64, XRT 2.25"


# --- Without XRT ------------------------------------------------------------------------------------------------------


def open_elsewhere(plugin: Path, **environment: str) -> str:
    """The output of a process that runs on this machine itself, without the driver's double."""
    done = subprocess.run(
        [sys.executable, "-c", OPEN, str(plugin)],
        # The environment keeps only what a sanitizer needs (Makefile).
        env={name: os.environ[name] for name in ("LD_PRELOAD", "ASAN_OPTIONS") if name in os.environ}
        | environment
        | {"PYTHONPATH": os.pathsep.join([".", os.environ.get("PYTHONPATH", "")])}
        | {"FLOWNPU_TESTING_DIR": str(BUILT.resolve())},
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_missing_plugin_is_named(tmp_path: Path) -> None:
    said = open_elsewhere(tmp_path / "libflownpu_xrt.so")
    assert re.match(r"version .*: this build of FlowNPU has no .*libflownpu_xrt.so: .*; `flownpu doctor` names", said)


def test_unfit_xrt_is_named(tmp_path: Path) -> None:
    """A library with XRT's name and none of its symbols."""
    require()
    shutil.copy(BUILT / "libflownpu_aie_xdna.so", tmp_path / "libxrt_coreutil.so.2")
    said = open_elsewhere(xrt.PLUGIN.resolve(), LD_LIBRARY_PATH=str(tmp_path))
    assert re.match(r"version .*the installed XRT does not fit this build \(.*undefined symbol: .*\); .*doctor", said)


def test_library_that_is_no_plugin_is_named() -> None:
    said = open_elsewhere(BUILT.resolve() / "libflownpu_aie_xdna.so")
    assert re.match("version .*libflownpu_aie_xdna.so is no plugin of FlowNPU; install FlowNPU again", said)
