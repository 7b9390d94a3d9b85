# SPDX-License-Identifier: Apache-2.0
"""Whole sessions with device=npu over XRT and a double of the driver that computes: numbers, and failures."""

import json
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flownpu.aie.programs import decode, dispatches
from flownpu.doctor.npu import FULL, JOIN_THE_GROUP, MORE_LOCKED_MEMORY, MORE_LOCKED_MEMORY_OF_ROOT, TOO_OLD
from flownpu.npu.artifacts import build_artifacts, programs_of_model
from tests.end_to_end.conftest import Tokens
from tests.end_to_end.npu import session
from tests.end_to_end.npu.session import BESIDE, CACHES, FAILURES, MIDDLE, PLACES, REFUSED
from tests.npu.firmware import CURRENT
from tests.npu.machine import Machine, with_plugin
from tests.npu.test_over_xrt import DRIVERS
from tests.npu.xdna_driver_artifacts import build_for_xdna_driver, write_for_xdna_driver

CONTEXT = 128
STEPS = 1 + session.STEPS  # the prompt's and the tokens'
TURNS = 512  # tokens of a conversation
SESSIONS = 4  # one more than there are ways to close one
DRIVER_LOG_HERE = "the driver's message is in `sudo dmesg`"


@pytest.fixture(scope="module")
def plugin(library: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_plugin(library, tmp_path_factory.mktemp("plugin"))


@pytest.fixture(scope="module")
def run_sessions(
    plugin: Path, converted: Callable[..., Path], held_out: Tokens, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., dict[str, Any]]:
    """Runs scenarios of session.py on a machine, and returns what it printed."""
    folder = tmp_path_factory.mktemp("npu")
    artifacts = build_for_xdna_driver(converted(), folder / "artifacts", CONTEXT)
    few = build_for_xdna_driver(converted(), folder / "few", CONTEXT, most_buffers=5)
    arguments = plugin, converted(), artifacts, json.dumps(held_out[:CONTEXT]), few

    def run(machine: Machine, *names: str, without: Sequence[str] = ()) -> dict[str, Any]:
        done = machine.python("-m", "tests.end_to_end.npu.session", *arguments, *names, without=without)
        assert done.returncode == 0, done.stderr[-3000:]
        document: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return document

    return run


@pytest.fixture(scope="module")
def sessions(run_sessions: Callable[..., dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """All scenarios, on a machine with two NPUs, of which the first is used."""
    return run_sessions(Machine(tmp_path_factory.mktemp("two"), devices=2))


@pytest.fixture(scope="module")
def conversation_artifacts(converted: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The folders of artifacts by device."""
    folder = tmp_path_factory.mktemp("artifacts")
    build_artifacts(converted(), context=TURNS, output=folder / "emulate")
    return {"npu": build_for_xdna_driver(converted(), folder / "npu", TURNS), "emulate": folder / "emulate"}


def for_device(model: Path, folder: Path, device: str, artifacts: Path) -> Path:
    """A copy of a model's folder whose sessions are on a device."""
    shutil.copytree(model, folder)
    config = json.loads((folder / "genai_config.json").read_text())
    options = {"device": device, "artifacts": str(artifacts)}
    config["model"]["decoder"]["session_options"]["provider_options"] = [{"FlowNPUExecutionProvider": options}]
    (folder / "genai_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def conversations(
    plugin: Path, converted: Callable[..., Path], conversation_artifacts: dict[str, Path],
    held_out: Tokens, prompts: list[Tokens], tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Any]:  # fmt: skip
    """The output of conversation.py, by driver, and for the emulator."""
    texts = json.dumps([held_out[:70], prompts[0], prompts[1]])
    found: dict[str, Any] = {}
    for name, driver in DRIVERS.items():
        home = tmp_path_factory.mktemp("conversation")
        folders = {
            device: for_device(converted(), home / device, device, artifacts)
            for device, artifacts in conversation_artifacts.items()
            if device not in found
        }
        machine = Machine(home, **driver)  # type: ignore[arg-type]
        done = machine.python("-m", "tests.end_to_end.npu.conversation", plugin, texts, *folders.values())
        assert done.returncode == 0, done.stderr[-3000:]
        document = json.loads(done.stdout.splitlines()[-1])
        assert (document["violations"], document["alive"]) == ([], 0)
        found[name] = document[str(folders["npu"])]
        if "emulate" in folders:
            found["emulate"] = document[str(folders["emulate"])]
    return found


@pytest.mark.parametrize("name", DRIVERS)
def test_conversation_over_xrt_equals_emulator(name: str, conversations: dict[str, Any]) -> None:
    """A prompt beyond the window, 3 tokens, a second turn, a rewind: the same logits, bit by bit."""
    assert [len(tokens) for tokens in conversations[name]["tokens"]] == [3, 2, 2]
    assert conversations[name] == conversations["emulate"]


def test_repeated_sessions_leave_no_resources(
    plugin: Path, converted: Callable[..., Path], conversation_artifacts: dict[str, Path], prompts: list[Tokens],
    tmp_path: Path,
) -> None:  # fmt: skip
    """FLOWNPU_SESSIONS sets how many are opened and closed: 1000 when it is run by hand."""
    count = int(os.environ.get("FLOWNPU_SESSIONS", SESSIONS))
    folder = for_device(converted(), tmp_path / "model", "npu", conversation_artifacts["npu"])
    arguments = plugin, folder, json.dumps(prompts[0][:3]), str(count)
    timeout = 300 + 5 * count
    done = Machine(tmp_path).python("-m", "tests.end_to_end.npu.many_sessions", *arguments, timeout=timeout)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    print(count, "sessions:", found)
    assert len(found["tokens"]) == 1
    first, *others = found["left"]
    assert [left["sessions"] for left in others][-1] == count
    assert {left["driver"] for left in found["left"]} == {0}
    assert {left["files"] for left in others} == {first["files"]}
    assert found["violations"] == []


def test_closed_sessions_leave_no_driver_resources(sessions: dict[str, Any]) -> None:
    """The memory of a hanging call is freed when the call has ended and the next session opens the device."""
    left = {name for name, found in sessions.items() if found["alive"] > 0}
    assert left <= {f"{name}, {place}" for name in ("hang", "lost") for place in (*PLACES, "pair")}
    assert sessions["well again"]["alive"] == 0
    assert {name: found["violations"] for name, found in sessions.items()} == {name: [] for name in sessions}


def test_array_logits_are_near_cpu(sessions: dict[str, Any]) -> None:
    """A rough comparison; test_emulate.py tests the exact distance on the same plans."""
    found, expected = (np.array(sessions[name]["top"]) for name in ("well", "cpu"))
    assert found.shape == expected.shape == (STEPS, 4096)
    assert np.sqrt(np.square(found - expected).mean()) < expected.std() / 20
    assert sessions["well again"]["top"] == sessions["well"]["top"]


REASONS = {
    "error": ["the array ended with an error", DRIVER_LOG_HERE],
    "hang": ["the array did not answer within 5000 ms (timeout)", DRIVER_LOG_HERE],
    "lost": ["the NPU is gone: ", "`flownpu doctor` tells"],
    "firmware": ["firmware 1.0.0.63, XRT 2.25: ", "EXEC_CMD", TOO_OLD, "`flownpu doctor MODEL`"],
}


@pytest.mark.parametrize(("fault", "place"), FAILURES)
def test_failure_names_call_and_cpu_goes_on(sessions: dict[str, Any], fault: str, place: str) -> None:
    """The CPU continues with the array's keys and values, so every step has its logits."""
    failed_at = MIDDLE if place == "middle" else 0
    found = sessions[f"{fault}, {place}"]
    (error,) = found["errors"]
    if failed_at:
        assert "decode_layer, layers 0-5, position 72" in error
    for reason in REASONS[fault]:
        assert reason in error
    assert "\n" not in error
    assert "next runs are on its CPU" in error
    top = np.array(found["top"])
    assert top.shape == (STEPS, 4096)
    # Before it failed, the array's; afterwards the CPU's, from the array's cache.
    assert found["top"][:failed_at] == sessions["well"]["top"][:failed_at]
    expected = np.array(sessions["cpu"]["top"])
    assert np.sqrt(np.square(top - expected).mean()) < expected.std() / 20
    assert top.argmax(-1).tolist() == expected.argmax(-1).tolist()
    assert found["top"][failed_at:] != sessions["well"]["top"][failed_at:]


@pytest.mark.parametrize("fault", [None, "error", "lost"])
def test_cpu_goes_on_after_prompt_failed_on_array_of_pair(sessions: dict[str, Any], fault: str | None) -> None:
    """The prompt is the array's; after a failure it is repeated on the CPU, which computes the tokens anyway."""
    found = sessions[f"{fault}, pair" if fault else "pair"]
    assert [("next runs are on its CPU" in error, REASONS[str(fault)][0] in error) for error in found["errors"]] == (
        [(True, True)] if fault else []
    )
    top, expected = np.array(found["top"]), np.array(sessions["cpu"]["top"])
    if fault:
        np.testing.assert_array_equal(top, expected)
    else:
        assert found["top"][0] == sessions["well"]["top"][0]
        assert np.sqrt(np.square(top - expected).mean()) < expected.std() / 20


def test_failure_without_fallback_is_repeated_by_later_runs(sessions: dict[str, Any]) -> None:
    found = sessions["error"]
    assert len(found["top"]) == MIDDLE
    assert len(found["errors"]) == 2 * (STEPS - MIDDLE)
    assert all("decode_layer, layers 0-5, position 72" in error for error in found["errors"])
    assert "on_unsupported=cpu" in found["errors"][0]


@pytest.mark.parametrize("name", CACHES)
def test_cache_without_memory_runs_later_or_on_cpu(sessions: dict[str, Any], name: str) -> None:
    """Nothing has failed: the next run finds memory, or the CPU takes this run and the array the next one."""
    found, expected = sessions[f"{name} for a cache"], sessions["well"]["top"]
    (error,) = found["errors"]
    for reason in ("a buffer of ", REFUSALS[name][-1], "one more conversation", "on_unsupported to cpu"):
        assert reason in error
    assert found["top"] == expected
    with_cpu = sessions[f"{name} for a cache, cpu"]
    assert with_cpu["errors"] == []
    assert with_cpu["top"][0] == sessions["cpu"]["top"][0]
    assert np.sqrt(np.square(np.array(with_cpu["top"]) - expected).mean()) < np.std(expected) / 20
    assert with_cpu["top"][1:] != sessions["cpu"]["top"][1:]


@pytest.mark.parametrize("name", BESIDE)
def test_refused_session_leaves_others_unharmed(sessions: dict[str, Any], name: str) -> None:
    found = sessions[f"{name}, beside"]
    (refused,) = found["other"]
    for reason in REFUSALS[name]:
        assert reason in refused
    assert found["errors"] == []
    assert found["top"] == sessions["well"]["top"]


REFUSALS = {
    "no device": ["No such device", "`flownpu doctor` tells"],
    "permission": ["Permission denied", JOIN_THE_GROUP],
    "no memory": ["Cannot allocate memory", "use a smaller context", FULL],
    "no context": ["No space left", FULL],
    "firmware": ["firmware 1.0.0.63, XRT 2.25: ", TOO_OLD, "`flownpu doctor MODEL`"],
    "locked memory": [MORE_LOCKED_MEMORY, MORE_LOCKED_MEMORY_OF_ROOT],
    "too few buffers": ["takes 5 buffers, and its call "],
}


@pytest.mark.parametrize("name", [*(f"{name}, cpu" for name in REFUSED), "no memory, warn"])
def test_refused_session_with_fallback_runs_on_cpu(name: str, sessions: dict[str, Any]) -> None:
    """The placement report of such a session says why, in the words of the refusal."""
    found, fault = sessions[name], name.partition(",")[0]
    assert found["top"] == sessions["cpu"]["top"]
    reason = REFUSALS[fault][0]
    assert reason in sessions[fault]["refused"]
    assert reason in json.loads(found["placement"])["on_host"][0]["reason"]


@pytest.mark.parametrize(
    ("machine", "without", "reasons"),
    [
        ({"driver": False}, [], ["XRT finds no NPU; load the driver", "`flownpu doctor` tells"]),
        ({"firmware": CURRENT, "linux": "6.19.8"}, [], ["the driver amdxdna is loaded", "firmware is missing or of"]),
        ({}, ["libxrt_driver_xdna"], ["XRT has not loaded libxrt_driver_xdna.so.2", "`flownpu doctor` names"]),
        ({}, ["libxrt_coreutil"], ["XRT is not installed", "`flownpu doctor` names"]),
    ],
    ids=["no driver", "not started", "no shim", "no XRT"],
)
def test_incomplete_machine_is_named_or_falls_back(
    machine: dict[str, Any], without: list[str], reasons: list[str], tmp_path: Path,
    run_sessions: Callable[..., dict[str, Any]], sessions: dict[str, Any],
) -> None:  # fmt: skip
    """A session's error names the missing part; with on_unsupported=cpu the CPU computes."""
    found = run_sessions(Machine(tmp_path, **machine), "well", "well or cpu", without=without)
    for reason in reasons:
        assert reason in found["well"]["refused"]
    assert found["well or cpu"]["top"] == sessions["cpu"]["top"]


@pytest.mark.parametrize("split", [True, False])
def test_dispatch_longer_than_watchdog_is_split_when_built(
    split: bool, plugin: Path, converted: Callable[..., Path], held_out: Tokens, sessions: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
) -> None:  # fmt: skip
    """Six layers in a call each, which the driver counts as 400 ms: more than its 2 s, if they are one run list."""
    for module in (decode, dispatches):
        monkeypatch.setattr(module, "MOST_SECONDS", 1e-9)
    programs = programs_of_model(converted(), "npu2", CONTEXT)[0]
    if not split:
        programs = [
            replace(program, steps=tuple(replace(step, apart=False) for step in program.steps)) for program in programs
        ]
    artifacts = write_for_xdna_driver(tmp_path / "deep", programs)
    machine = Machine(tmp_path, settings="call=400 watchdog=2000")
    arguments = plugin, converted(), artifacts, json.dumps(held_out[:CONTEXT]), artifacts
    done = machine.python("-m", "tests.end_to_end.npu.session", *arguments, "well")
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])["well"]
    if split:
        assert (found["errors"], found["top"]) == ([], sessions["well"]["top"])
    else:
        assert "the driver's watchdog ended it (timeout)" in found["errors"][0]


@pytest.mark.parametrize("name", REFUSALS)
def test_refused_session_names_reason(sessions: dict[str, Any], name: str) -> None:
    """The error names the finding and the remedy."""
    assert "FlowNPU" in sessions[name]["refused"]
    for reason in REFUSALS[name]:
        assert reason in sessions[name]["refused"]
