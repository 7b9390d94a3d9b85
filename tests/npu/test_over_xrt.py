# SPDX-License-Identifier: Apache-2.0
"""The XRT runtime over Debian's XRT, below which a double of the kernel's driver computes; no NPU has run it.

What is in over_xrt/ runs in one process for each of two drivers, the rest in processes of their own: XRT looks for
devices once in a process.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.aie.host_kernels import BUILT
from tests.npu import xrt
from tests.npu.machine import ROOT, Machine, require

if TYPE_CHECKING:
    from pathlib import Path

FOLDER = ROOT / "tests/npu/over_xrt"
# As Linux 7 has it: a context has a timeline, and XRT flushes caches itself.
# As before: contexts are waited for with a request. And the driver moves all data, which is how a move that is
# missing shows: the array has memory of its own.
DRIVERS = {
    "timelines": {"settings": "", "ini": ""},
    "own memory": {"settings": "timelines=0 separate=1", "ini": "[Debug]\nforce_driver_sync=true\n"},
}


@pytest.mark.parametrize("name", DRIVERS)
def test_over_xrt(name: str, tmp_path: Path) -> None:
    require()
    machine = Machine(tmp_path, **DRIVERS[name])  # type: ignore[arg-type]
    done = machine.python("-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--tb=short", FOLDER)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed, done.stdout
    assert int(passed[1]) > 60  # it looked at the right folder


OPEN = """
import sys
from tests.npu.arrays import npu
try:
    print("opened", npu.open_xrt_runtime(*sys.argv[1:]).description)
except npu.DeviceError as error:
    print(error.failure, error)
"""


@pytest.mark.parametrize(
    ("devices", "without", "said"),
    [
        (2, (), "opened NPU Strix, XRT 2.25"),
        (None, (), r"no_device .*XRT finds no NPU; load the driver \(sudo modprobe amdxdna\)"),
        (0, (), r"no_device .*XRT finds no NPU; load the driver \(sudo modprobe amdxdna\)"),
        (
            1,
            ["libxrt_driver_xdna"],
            r"version .*XRT has not loaded libxrt_driver_xdna.so.2; install XRT with its part for NPUs "
            r"\(Debian: libxrt-npu2\)",
        ),
        (1, ["libxrt_core.so"], r"version .*libxrt_core\.so\.2.*; install XRT with its part for NPUs"),
        (
            1,
            ["libxrt_coreutil"],
            r"version .*XRT is not installed \(libxrt_coreutil.so.2: .*; install it \(Deb",
        ),
    ],
)
def test_machines(devices: int | None, without: list[str], said: str, tmp_path: Path) -> None:
    require()
    done = Machine(tmp_path, devices=devices).python("-c", OPEN, without=without)
    assert done.returncode == 0, done.stderr
    assert re.match(said, done.stdout.splitlines()[-1])


# --- Without XRT ------------------------------------------------------------------------------------------------------


def open_elsewhere(plugin: Path, **environment: str) -> str:
    """What a process says on this machine."""
    done = subprocess.run(
        [sys.executable, "-c", OPEN, str(plugin)],
        # What a sanitizer needs (Makefile) stays; the rest is bare.
        env={name: os.environ[name] for name in ("LD_PRELOAD", "ASAN_OPTIONS") if name in os.environ}
        | environment
        | {"PYTHONPATH": os.pathsep.join([".", os.environ.get("PYTHONPATH", "")])}
        | {"FLOWNPU_TESTING_DIR": str(BUILT.resolve())},
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_without_the_plugin(tmp_path: Path) -> None:
    said = open_elsewhere(tmp_path / "libflownpu_xrt.so")
    assert re.match(
        r"version \[FlowNPU\] device 'npu': this build of FlowNPU has no .*libflownpu_xrt.so; install XRT", said
    )


def test_an_xrt_without_what_is_needed(tmp_path: Path) -> None:
    """A library of XRT's name that has none of the symbols."""
    require()
    shutil.copy(BUILT / "libflownpu_aie_xdna.so", tmp_path / "libxrt_coreutil.so.2")
    said = open_elsewhere(xrt.PLUGIN.resolve(), LD_LIBRARY_PATH=str(tmp_path))
    assert re.match(
        r"version .*: the installed XRT does not fit this build \(.*undefined symbol: .*\); install XRT 2", said
    )


def test_a_plugin_that_is_none() -> None:
    said = open_elsewhere(BUILT.resolve() / "libflownpu_aie_xdna.so")
    assert re.match("version .*libflownpu_aie_xdna.so is no plugin of FlowNPU; install FlowNPU again", said)
