# SPDX-License-Identifier: Apache-2.0
"""The command line on machines with an NPU, as a user types it: over XRT, and a double of the driver that computes."""

import json
import re
import shutil
from collections.abc import Callable
from errno import EOPNOTSUPP
from pathlib import Path
from typing import Any

import pytest

from flownpu.doctor.checks import JOIN_THE_GROUP
from flownpu.doctor.npu import DRIVER_LOG, TOO_OLD
from flownpu.doctor.npu_packages import release_of
from tests.npu.firmware import CURRENT, FIRST
from tests.npu.machine import Machine, with_plugin
from tests.npu.xdna_driver_artifacts import build_for_xdna_driver

CONTEXT = 64
# The commands that install XRT and the firmware on the system that runs the tests, as regular expressions.
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
    """A model with artifacts where a session looks for them."""
    folder = Path(shutil.copytree(converted(), tmp_path_factory.mktemp("commands") / "model"))
    build_for_xdna_driver(folder, folder / "artifacts/npu2", CONTEXT)
    return folder


State = tuple[dict[str, Any], list[str], dict[str, tuple[str, str, str]]]
UNTRIED = {"a token": ("note", "^not tried with .*: the NPU is to be mended first$", "^$")}

# The machine, libraries that it lacks, and what doctor says: of each check its status, what it found, what mends it.
STATES: dict[str, State] = {
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
    "firmware that Linux 6.19 does not take": (
        {"firmware": CURRENT, "linux": "6.19.8"},
        [],
        {
            "npu": ("bad", r"npu_7\.sbin is npu\.sbin\.1\.1\.2\.64, Incompatible firmware protocol major 7", FIRMWARE),
            **UNTRIED,
        },
    ),
    "no XRT": (
        {},
        ["libxrt"],
        {
            "npu": ("good", "accel0", "^$"),
            "xrt": ("note", "^not installed; the npu device needs it$", RUNTIME),
            "a token": ("bad", r"XRT is not installed .*`flownpu doctor` names", ""),
        },
    ),
    "no permission": (
        {"settings": "forbidden=1"},
        [],
        {"npu": ("bad", "accel0, which this user may not open$", re.escape(JOIN_THE_GROUP)), **UNTRIED},
    ),
    # Other failures are in tests/npu/over_xrt/test_runtime.py, other remedies in tests/cli/doctor/.
    # The first call hangs, so that no call before it can exceed the limit.
    "a call that nothing ends": (
        {"settings": "hang=-1", "time_limit": "1"},
        [],
        {
            "npu": ("good", "accel0", "^$"),
            "a token": ("bad", "did not answer within 1000 ms", f"^{re.escape(DRIVER_LOG)}$"),
        },
    ),
}


@pytest.mark.parametrize("state", STATES)
def test_doctor_reports_expected_checks(state: str, plugin: Path, model: Path, tmp_path: Path) -> None:
    options, without, expected = STATES[state]
    done = Machine(tmp_path, **options).python("-c", FLOWNPU, plugin.parent, "doctor", model, "--json", without=without)
    report = json.loads(done.stdout)
    checks = {check["name"]: check for check in report["checks"]}
    for name, (status, found, remedy) in expected.items():
        check = checks[name]
        assert check["status"] == status, check
        assert re.search(found, check["found"]), check
        assert re.search(remedy, check["remedy"]), check
    # How much memory may be locked depends on the machine that runs the tests.
    broken = {name for name, check in checks.items() if check["status"] == "bad"}
    assert broken - {"memory lock"} == {name for name, (status, _, _) in expected.items() if status == "bad"}
    assert (done.returncode, report["ok"]) == (int(bool(broken)), not broken)
