# SPDX-License-Identifier: Apache-2.0
"""`flownpu selftest`: the stages on the emulator, failing stages, and parameters from times."""

import dataclasses
import json
import math
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from flownpu.aie.artifacts.toolchain import KERNELS
from flownpu.aie.cost.chips import CHIPS
from flownpu.aie.cost.kernels import published_cycles
from flownpu.aie.cost.parameters import TABLE, VALUES
from flownpu.aie.plan.limits import NPU2
from flownpu.aie.programs.call import ArtifactCall
from flownpu.selftest import runner, stages, worker
from flownpu.selftest.decoder import SHAPE
from flownpu.selftest.measures import MEASURES, measure
from flownpu.selftest.outcome import Outcome
from flownpu.selftest.report import SelftestReport
from flownpu.selftest.runner import StageResult, StageRunner
from flownpu.selftest.worker import Run

THREE = ("--only", "copy", "--only", "kernel rms_norm", "--only", "rms_norm")


def report_of(folder, device="emulate"):
    return json.loads((folder / device / "report.json").read_text())


def outcomes(report):
    return {stage["stage"]: stage["outcome"] for stage in report["stages"]}


# --- The stages -------------------------------------------------------------------------------------------------------


def changed_stages(monkeypatch, change):
    """Replaces each stage of the self-test by what `change` makes of it."""
    known = stages.selftest_stages
    monkeypatch.setattr(
        stages, "selftest_stages", lambda target, *, many: [change(stage) for stage in known(target, many=many)]
    )


@pytest.fixture
def in_this_process(monkeypatch):
    """Runs stages at once, in place of processes, each of which would import all anew; scripts have their processes."""
    start = subprocess.Popen

    def run(command, **options):
        if "-m" not in command:
            return start(command, **options)
        worker.main(Path(command[-1]))
        return SimpleNamespace(wait=lambda _: 0)

    monkeypatch.setattr(runner.subprocess, "Popen", run)


@pytest.mark.usefixtures("in_this_process")
def test_stages_all_pass_on_emulator(flownpu, tmp_path, monkeypatch):
    """Every kernel that kernels.h declares is called by a stage, too."""
    expected, called = [stage.name for stage in stages.selftest_stages("npu2", many=False)], set()

    def watched(stage):
        def make(rng):
            trial = stage.make(rng)
            calls = [step.call for step in trial.program.steps if isinstance(step.call, ArtifactCall)]
            called.update(kernel.entry for call in calls for kernel in call.last_plan.array.kernels)
            return trial

        return dataclasses.replace(stage, make=make)

    changed_stages(monkeypatch, watched)
    done = flownpu("selftest", "--output", tmp_path)
    assert done.code == 0, done.err
    report = report_of(tmp_path)
    assert set(outcomes(report).values()) == {"passed"}
    assert list(outcomes(report)) == expected
    assert all(0 <= stage["share"] <= 1 for stage in report["stages"])
    assert report["measured"] == {}
    assert report["measurements"] == []
    assert "Nothing of it was measured" in done.out
    assert f"{len(expected)} of {len(expected)} stages passed" in done.out
    entries = set(re.findall(r"^void (\w+)\(", (KERNELS / "kernels.h").read_text(), re.MULTILINE))
    assert entries == called


@pytest.mark.usefixtures("in_this_process")
def test_xdna_stages_pass_on_emulator(flownpu, tmp_path):
    """The first generation: half of the columns, bf16 only."""
    patterns = ("copy*", "streams", "kernel *[!e]", "fused_dqp none", "flow_kv*")
    options = [option for pattern in patterns for option in ("--only", pattern)]
    done = flownpu("selftest", "--target", "npu1", *options, "--output", tmp_path, "--json", "-")
    assert done.code == 0, done.err
    report = json.loads(done.out)
    assert {"copy", "kernel q4nx_dequant_bf16", "flow_kv window"} < set(outcomes(report))
    assert not any("bfp16" in name for name in outcomes(report))
    assert report == report_of(tmp_path)


# --- Stages that fail -------------------------------------------------------------------------------------------------


def planted(monkeypatch, name, change):
    """Changes a stage's trial."""

    def changed(stage):
        return dataclasses.replace(stage, make=lambda rng: change(stage.make(rng))) if stage.name == name else stage

    changed_stages(monkeypatch, changed)


def damaged(trial):
    """Flips one bit of one constant, unknown to the reference."""
    name, content = next(iter(trial.inputs.items()))
    content = content.copy()
    content.view(np.uint8).reshape(-1)[1] ^= 0x40
    return dataclasses.replace(trial, inputs={**trial.inputs, name: content})


def with_step(trial, **changes):
    """The trial with changes to its only step."""
    (step,) = trial.program.steps
    steps = (dataclasses.replace(step, **changes),)
    return dataclasses.replace(trial, program=dataclasses.replace(trial.program, steps=steps))


def reads_elsewhere(trial):
    """The row and the weight are swapped."""
    x, weight, y = trial.program.steps[0].views
    return with_step(trial, views=(weight, x, y))


@dataclasses.dataclass
class OfAnotherPlan:
    """A design's program with a mistake in its plan: the stride between rows of x is halved."""

    program: Any

    def resolve_program(self, name):
        plan = self.program.resolve_program(name)
        steps = tuple(
            dataclasses.replace(step, tap=half_as_far(step.tap)) if getattr(step, "buffer", "") == "x_0" else step
            for step in plan.sequence.steps
        )
        return dataclasses.replace(plan, sequence=dataclasses.replace(plan.sequence, steps=steps))


def half_as_far(tap):
    rows, *inner = tap.walk
    return dataclasses.replace(tap, walk=(dataclasses.replace(rows, stride=rows.stride // 2), *inner))


def of_another_plan(trial):
    call = trial.program.steps[0].call
    return with_step(
        trial, call=dataclasses.replace(call, program=lambda position: OfAnotherPlan(call.program(position)))
    )


@pytest.mark.usefixtures("in_this_process")
@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("copy", damaged, r"y_0: 1 of 16384 elements are beyond their tolerance; at \(0, 0\)"),
        ("copy", of_another_plan, r"y_0: 153\d\d of 16384 elements .* at \(1, 0\)"),
        ("kernel rms_norm", reads_elsewhere, "y: .* elements are beyond their tolerance"),
    ],
)
def test_wrong_stage_fails_alone(flownpu, tmp_path, monkeypatch, name, change, message):
    planted(monkeypatch, name, change)
    done = flownpu("selftest", *THREE, "--output", tmp_path)
    assert done.code == 1
    expected = dict.fromkeys(("copy", "kernel rms_norm", "rms_norm"), "passed") | {name: "wrong"}
    assert outcomes(report_of(tmp_path)) == expected
    assert re.search(f"{name}: wrong: {message}", done.err)
    assert "2 of 3 stages passed" in done.out


def with_another_process(monkeypatch, name, script):
    """Runs a script in place of a stage's worker."""
    known = runner.worker_command
    monkeypatch.setattr(
        runner, "worker_command",
        lambda folder: [sys.executable, "-c", script] if folder.name == name else known(folder),
    )  # fmt: skip


@pytest.mark.usefixtures("in_this_process")
def test_hanging_stage_ends_at_time_limit(flownpu, tmp_path, monkeypatch):
    with_another_process(monkeypatch, "kernel-rms_norm", "import time; time.sleep(600)")
    changed_stages(
        monkeypatch, lambda stage: dataclasses.replace(stage, seconds=0.5 if stage.name == "kernel rms_norm" else 60)
    )
    done = flownpu("selftest", *THREE, "--output", tmp_path)
    assert done.code == 1
    assert outcomes(report_of(tmp_path)) == {"copy": "passed", "kernel rms_norm": "timed out", "rms_norm": "passed"}
    assert "expected it to end within 0.5 s, and it did not" in done.err


def test_seconds_bound_every_stage(flownpu, tmp_path):
    done = flownpu("selftest", "--only", "copy", "--seconds", 0.01, "--output", tmp_path)
    assert done.code == 1
    assert outcomes(report_of(tmp_path)) == {"copy": "timed out"}


@pytest.mark.usefixtures("in_this_process")
@pytest.mark.parametrize(
    ("script", "message"),
    [
        (
            f"import os; os.kill(os.getpid(), {int(signal.SIGSEGV)})",
            f"its process ended with signal {int(signal.SIGSEGV)}",
        ),
        ("import sys; sys.exit('the firmware is gone')", "the firmware is gone"),
        ("import os; os._exit(3)", "its process ended with exit code 3"),
    ],
)
def test_stage_whose_process_ends_fails_alone(flownpu, tmp_path, monkeypatch, script, message):
    with_another_process(monkeypatch, "kernel-rms_norm", script)
    done = flownpu("selftest", *THREE, "--output", tmp_path)
    assert done.code == 1
    assert outcomes(report_of(tmp_path)) == {"copy": "passed", "kernel rms_norm": "failed", "rms_norm": "passed"}
    assert message in done.err


def test_group_not_built_is_reported(flownpu, tmp_path):
    """A file is where the group's folder of artifacts would be."""
    (tmp_path / "emulate" / "artifacts").mkdir(parents=True)
    (tmp_path / "emulate" / "artifacts" / "kernel-rms_norm").write_text("")
    done = flownpu("selftest", *THREE, "--output", tmp_path)
    assert done.code == 1
    assert outcomes(report_of(tmp_path)) == {"copy": "passed", "kernel rms_norm": "not built", "rms_norm": "passed"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--only", "gemmm*"], "expected a pattern of one of 'copy', "),
        (["--seconds", "0"], "--seconds"),
        (["--seconds", "soon"], "--seconds"),
        (["--device", "tpu"], "'tpu' is not one of 'emulate', 'npu', 'gpu'"),
        (["--target", "npu3"], "'npu3' is not one of 'npu1', 'npu2'"),
    ],
)
def test_unfit_options_are_refused(flownpu, tmp_path, options, message):
    done = flownpu("selftest", *options, "--output", tmp_path)
    assert done.code == 2
    assert message in done.err
    assert list(tmp_path.iterdir()) == []


# --- On an NPU --------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_tools")
def test_missing_toolchain_is_named(flownpu, tmp_path):
    done = flownpu("selftest", "--device", "npu", "--output", tmp_path)
    assert done.code == 1
    assert "aiecc was not found" in done.err
    assert "Peano was not found" in done.err


@pytest.mark.usefixtures("tools")
def test_missing_npu_fails_all_stages(flownpu, tmp_path):
    """Stand-ins compile the files, and the runtime of a missing real NPU opens them."""
    done = flownpu("selftest", "--device", "npu", "--only", "copy", "--only", "rms_norm", "--output", tmp_path)
    assert done.code == 1
    report = report_of(tmp_path, "npu")
    assert outcomes(report) == {"copy": "failed", "rms_norm": "failed"}
    assert all("[FlowNPU]" in stage["text"] for stage in report["stages"])
    stand_ins = {"aiecc": "aiecc 1.0", "peano": "clang++ 1.0", "xclbinutil": "XRT Build Version: 2.25.00"}
    assert report["toolchain"] == stand_ins
    assert report["measured"] == {}
    assert {found["reason"] for found in report["measurements"]} > {"stage 'copy' did not pass"}
    assert f"Please send {tmp_path / 'npu' / 'report.json'} and {tmp_path / 'npu' / 'stages'}" in done.out


# --- What times tell --------------------------------------------------------------------------------------------------

CLOCK, CORES = NPU2.clock_megahertz * 1e6, 32
ASSUMED = {
    "dispatch": 47e-6, "channel_read": 5e9, "memory_read": 60e9, "array_change": 3e-3, "wait": 4e-6,
    "own_host_per_logit": 2e-9, "dequant_block": 2000, "dqp_block": 3000, "vector_element": 0.5,
    "gemm_operations": 13e12,
}  # fmt: skip


def made_up(stage):
    """The seconds that a stage takes if parameters are ASSUMED: the cost of its work, and a dispatch."""
    p, work = ASSUMED, stage.work
    name = stage.name.removesuffix(", more")
    if name == "copy":
        return work / p["channel_read"] + p["dispatch"] - 32768 / p["channel_read"]
    if name in {"decode_layer", "decode_layer, two layers"}:
        # Six columns of tiles, two streams of weights each.
        return p["dispatch"] + work * (SHAPE.weight_bytes() / 12 / p["channel_read"] + 6 * p["wait"])
    cost = {
        "streams": 1 / p["memory_read"],
        "kernel q4nx_dequant_bf16": p["dequant_block"] / CLOCK,
        "kernel fused_dqp": p["dqp_block"] / CLOCK,
        "gemm bf16": 1 / p["gemm_operations"],
    }
    for name_of_size, d in (("flow_qkv nca", 64), ("flow_qkv nca, d 128", 128)):
        # The kernels of a chunk of 32 keys for 8 queries, as the cost model has them.
        values = {**VALUES, **p}
        chunk = sum(
            published_cycles(CHIPS["kraken-350"], values, kernel, [8, 32, d], 0)
            for kernel in ("flow_qkv_scores", "flow_qkv_values")
        )
        cost[name_of_size] = chunk / (2 * 8 * 32 * d) / (CORES * CLOCK)
    # Vector kernels are slower or faster than their mean by these factors.
    for share, kernel in zip((0.5, 1.5), ("rms_norm", "rope"), strict=True):
        cost[f"kernel {kernel}"] = share * p["vector_element"] / CLOCK
    return p["dispatch"] + work * cost.get(name, 0)


def results_of(seconds):
    """Results of all stages as if each had taken `seconds(stage)`; the first of three runs is slower."""
    found = []
    for stage in stages.selftest_stages("npu2", many=True):
        took = seconds(stage)
        run = Run("npu2", [1.0, took, took], [2e-9 * 4096 * 1024] * 3, 4096 * 1024)
        found.append(StageResult(stage.name, Outcome.PASSED, share=0.5, error=0.1, work=stage.work, run=run))
    alone = {result.name: result.seconds for result in found}
    calls = alone["dequant_engine bf16"] + alone["gemm bf16"]
    turns = 8 * calls + 16 * ASSUMED["array_change"]
    return [
        dataclasses.replace(result, run=dataclasses.replace(result.run, seconds=[1.0, turns]))
        if result.name == "arrays in turn"
        else result
        for result in found
    ]


def test_parameters_follow_from_times():
    found = {each.name: each for each in measure(results_of(made_up), "npu2")}
    assert {name: each.value for name, each in found.items()} == pytest.approx(ASSUMED)
    assert not any(each.reason for each in found.values())
    assert found["dispatch"].assumed == TABLE["dispatch"].value


def test_report_has_measured_parameters():
    report = SelftestReport("npu", "npu2", {"aiecc": "1"}, results_of(made_up)).document()
    measured = report["measured"]
    assert {"dispatch", "channel_read", "memory_read", "wait", "dqp_block", "vector_element"} <= set(measured)
    assert set(measured) <= set(TABLE)
    assert all(isinstance(value, float) and math.isfinite(value) for value in measured.values())
    assert {each["name"] for each in report["measurements"]} == {each.name for each in MEASURES}
    # On the emulator the same times mean nothing.
    assert SelftestReport("emulate", "npu2", {}, results_of(made_up)).document()["measured"] == {}


def test_failed_or_noisy_times_give_no_parameter():
    """Failed stages and noisy times give no parameter, but a reason."""
    results = [
        dataclasses.replace(result, outcome=Outcome.WRONG) if result.name == "copy" else result
        for result in results_of(lambda _stage: 50e-6)
    ]
    found = {each.name: each for each in measure(results, "npu2")}
    assert all(each.value is None for name, each in found.items() if name not in {"own_host_per_logit", "array_change"})
    assert found["dispatch"].reason == "stage 'copy' did not pass"
    assert "noise" in found["dqp_block"].reason
    assert "noise" in found["memory_read"].reason


def test_infinite_error_is_null_in_json():
    result = StageResult("copy", Outcome.WRONG, "y_0: nan", math.inf, math.inf)
    (record,) = SelftestReport("emulate", "npu2", {}, [result]).document()["stages"]
    assert record["share"] is None
    json.dumps(record, allow_nan=False)


def test_stage_inputs_do_not_depend_on_selection(tmp_path):
    """A failed stage can be tried again alone, with the same inputs."""
    chosen = [stage for stage in stages.selftest_stages("npu2", many=False) if stage.name in {"copy", "rms_norm"}]
    list(StageRunner("npu2", tmp_path / "all").run(chosen))
    list(StageRunner("npu2", tmp_path / "one").run(chosen[-1:]))
    first, second = (tmp_path / part / "stages" / "rms_norm" / "inputs.npz" for part in ("all", "one"))
    assert first.read_bytes() == second.read_bytes()
