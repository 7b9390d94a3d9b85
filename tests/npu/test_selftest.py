# SPDX-License-Identifier: Apache-2.0
"""`flownpu selftest --device npu` without an NPU: over XRT and a double of the driver, which computes by the emulator.

Stand-ins take the place of aiecc's compiled files (xdna_driver_artifacts.py); all else is as with a real NPU.
"""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from flownpu import _native
from flownpu.cli import main, selftest
from flownpu.selftest import runner
from flownpu.selftest.measures import MEASURES
from tests.npu import xrt
from tests.npu.machine import Machine, require
from tests.npu.xdna_driver_artifacts import write_for_xdna_driver

# The native module looks for the plugin beside itself.
WORKER = """
import importlib.util, sys
from pathlib import Path
spec = importlib.util.spec_from_file_location("flownpu._native", sys.argv[2])
sys.modules["flownpu._native"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules["flownpu._native"])
from tests.npu import xrt
driver = xrt.Driver()
from flownpu.selftest.worker import main
main(Path(sys.argv[1]))
"""


@pytest.fixture
def npu_of_the_driver(tmp_path, monkeypatch):
    """A machine with a toolchain and an NPU."""
    require()
    native = Path(shutil.copy(_native.__file__, tmp_path))
    (tmp_path / xrt.PLUGIN.name).symlink_to(xrt.PLUGIN.resolve())
    toolchain = SimpleNamespace(versions={"aiecc": "a double"})
    monkeypatch.setattr(selftest, "find_toolchain", lambda: (toolchain, []))
    monkeypatch.setattr(runner, "write_compiled", lambda folder, programs: write_for_xdna_driver(folder.path, programs))
    machine = Machine(tmp_path)
    command = ["env", *(f"{name}={value}" for name, value in machine.variables().items())]
    command += machine.command("-c", WORKER)
    monkeypatch.setattr(runner, "worker_command", lambda folder: [*command, str(folder), str(native)])


@pytest.mark.usefixtures("npu_of_the_driver")
def test_stages_run_and_are_timed(tmp_path, capfd):
    patterns = ("copy*", "kernel fused_dqp*", "decode_layer*", "token")
    options = [option for pattern in patterns for option in ("--only", pattern)]
    code = main(["selftest", "--device", "npu", *options, "--output", str(tmp_path)])
    captured = capfd.readouterr()
    assert code == 0, captured.err
    report = json.loads((tmp_path / "npu" / "report.json").read_text())
    assert {stage["outcome"] for stage in report["stages"]} == {"passed"}
    assert "NPU Strix, firmware 255.0.5.35, XRT 2.25" in report["runtime"]
    assert all(len(stage["run"]["seconds"]) == 20 for stage in report["stages"])
    # A double measures meaningless values; the test only asks whether they exist.
    found = {each["name"]: each for each in report["measurements"]}
    assert set(found) == {each.name for each in MEASURES}
    assert {"dispatch", "own_host_per_logit"} <= set(report["measured"])
    assert "stage 'streams, more' did not pass" in found["memory_read"]["reason"]
    assert "measured" in captured.out
    assert f"--measured {tmp_path / 'npu' / 'report.json'}" in captured.out
