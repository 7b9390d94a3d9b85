# SPDX-License-Identifier: Apache-2.0
"""The command line on machines with an NPU, as a user types it: over XRT, and a double of the driver that computes."""

from __future__ import annotations

import json
import re
import shutil
from errno import EOPNOTSUPP
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from flownpu.doctor.npu import DRIVER_LOG, TOO_OLD
from flownpu.doctor.npu_packages import release_of
from tests.npu.firmware import CURRENT, FIRST, Firmware
from tests.npu.machine import Machine, with_plugin
from tests.npu.xdna_driver_artifacts import build_for_xdna_driver

if TYPE_CHECKING:
    from collections.abc import Callable

CONTEXT = 64
# What installs things on the machine that runs the tests.
RUNTIME, FIRMWARE = (re.escape(getattr(release_of(Path("/")), what)) for what in ("runtime", "firmware"))
# The library and the plugin that are tested come before the installed ones.
FLOWNPU = """
import sys
import flownpu
flownpu.__path__.insert(0, sys.argv[1])
from flownpu.cli import main
sys.exit(main(sys.argv[2:]))
"""


@pytest.fixture(scope="module")
def plugin(library: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_plugin(library, tmp_path_factory.mktemp("plugin"))


@pytest.fixture(scope="module")
def model(converted: Callable[..., Path], plugin: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:  # noqa: ARG001
    """With artifacts where a session looks for them."""
    folder = Path(shutil.copytree(converted(), tmp_path_factory.mktemp("commands") / "model"))
    build_for_xdna_driver(folder, folder / "artifacts/npu2", CONTEXT)
    return folder


# The machine, libraries that it lacks, and what doctor says: of each check its status, what it found, what mends it.
STATES: dict[str, tuple[dict[str, Any], list[str], dict[str, tuple[str, str, str]]]] = {
    "well": (
        {"devices": 2},
        [],
        {
            "npu": ("good", r"accel1, firmware 255\.0\.5\.35$", "^$"),
            "npus": ("note", "^2; FlowNPU uses the first", "xrt-smi"),
            "xrt": ("good", r"^XRT 2\.25 in /", "^$"),
            "a token": ("good", r" on npu \(NPU Strix, firmware 255\.0\.5\.35, XRT 2\.25; ", "^$"),
        },
    ),
    "no shim": (
        {},
        ["libxrt_driver_xdna"],
        {
            "npu": ("good", "accel0", "^$"),
            "xrt": ("bad", r"its part for NPUs, libxrt_driver_xdna\.so\.2, is missing", RUNTIME),
            "a token": ("bad", r"XRT has not loaded libxrt_driver_xdna\.so\.2 .*`flownpu doctor` names", ""),
        },
    ),
    "another firmware": (
        {"firmware": FIRST, "settings": f"context={EOPNOTSUPP}"},
        [],
        {
            "npu": ("good", r"accel0, firmware 1\.0\.0\.63$", "^$"),
            "a token": ("bad", rf"on NPU Strix, firmware 1\.0\.0\.63, XRT 2\.25: .*{TOO_OLD}", FIRMWARE),
        },
    ),
    "no firmware": (
        {"firmware": None},
        [],
        {
            "npu": (
                "bad",
                "driver amdxdna is loaded, and finds no firmware in /lib/firmware/amdnpu/17f0_10$",
                FIRMWARE,
            ),
            "a token": ("note", "^not tried with .*: the NPU is to be mended first$", "^$"),
        },
    ),
    "firmware that Linux 6.19 does not take": (
        {"firmware": CURRENT, "linux": "6.19.8"},
        [],
        {
            "npu": ("bad", r"npu_7\.sbin is npu\.sbin\.1\.1\.2\.64, Incompatible firmware protocol major 7", FIRMWARE),
            "a token": ("note", "^not tried with .*: the NPU is to be mended first$", "^$"),
        },
    ),
    "firmware that Linux 7 does not take": (
        {"firmware": Firmware("1.0.0.5", (6, 1))},
        [],
        {
            "npu": ("bad", r"npu\.sbin is npu\.sbin\.1\.0\.0\.5, start npu failed, ret -95", FIRMWARE),
            "a token": ("note", "^not tried with .*: the NPU is to be mended first$", "^$"),
        },
    ),
    "a call that hangs": (
        {"settings": "hang=50"},
        [],
        {
            "xrt": ("good", "XRT 2.25", "^$"),
            "a token": ("bad", "the driver's watchdog ended it", f"^{re.escape(DRIVER_LOG)}$"),
        },
    ),
}


@pytest.mark.parametrize("state", STATES)
def test_what_doctor_says(state: str, plugin: Path, model: Path, tmp_path: Path) -> None:
    options, without, expected = STATES[state]
    done = Machine(tmp_path, **options).python("-c", FLOWNPU, plugin.parent, "doctor", model, "--json", without=without)
    report = json.loads(done.stdout)
    checks = {check["name"]: check for check in report["checks"]}
    for name, (status, found, remedy) in expected.items():
        check = checks[name]
        assert check["status"] == status, check
        assert re.search(found, check["found"]), check
        assert re.search(remedy, check["remedy"]), check
    # What this process may lock is this machine's.
    broken = {name for name, check in checks.items() if check["status"] == "bad"}
    assert broken - {"memory lock"} == {name for name, (status, _, _) in expected.items() if status == "bad"}
    assert (done.returncode, report["ok"]) == (int(bool(broken)), not broken)
