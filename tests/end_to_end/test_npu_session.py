# SPDX-License-Identifier: Apache-2.0
"""Whole sessions with device=npu over the double of XRT: the emulator's numbers, and what happens when it fails."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.npu import xrt
from tests.npu.double_artifacts import build_for_double

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.end_to_end.conftest import Tokens

ROOT = Path(__file__).parents[2]
CONTEXT = 128
STEPS = 1 + 6  # the prompt's and six tokens'
FAILED_AT = 3


@pytest.fixture(scope="module")
def sessions(
    library: Path, converted: Callable[..., Path], held_out: Tokens, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """What npu_session.py printed."""
    xrt.require()
    folder = tmp_path_factory.mktemp("npu")
    for file in (library, xrt.PLUGIN, *xrt.BUILT.glob("libflownpu_aie_xdna*.so")):
        shutil.copy(file, folder)
    artifacts = build_for_double(converted(), folder / "artifacts", CONTEXT)
    ids = json.dumps(held_out[:CONTEXT])
    command = [sys.executable, "-m", "tests.end_to_end.npu_session", folder / library.name, converted(), artifacts, ids]
    done = subprocess.run(list(map(str, command)), cwd=ROOT, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    document: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return document


def test_nothing_is_left_of_any_session(sessions: dict[str, Any]) -> None:
    """What a call uses that hangs is freed when it has ended and the device is opened again: by the session after."""
    left = {name: found["alive"] for name, found in sessions.items() if found["alive"] > 0}
    assert set(left) <= {"hang", "lost"}
    assert sessions["well again"]["alive"] == 0
    assert {name: found["violations"] for name, found in sessions.items()} == {name: [] for name in sessions}


def test_the_array_computes_what_the_cpu_does(sessions: dict[str, Any]) -> None:
    """Roughly: how near they come is the business of test_emulate.py, on the same plans."""
    found, expected = (np.array(sessions[name]["top"]) for name in ("well", "cpu"))
    assert found.shape == expected.shape == (STEPS, 4096)
    assert np.sqrt(np.square(found - expected).mean()) < expected.std() / 20
    assert sessions["well again"]["top"] == sessions["well"]["top"]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("error", "the array ended with an error"),
        ("hang", "the array did not answer within 5000 ms"),
        ("submit", "EXEC_CMD"),
        ("lost", "No such device"),
    ],
)
def test_a_failure_names_the_call_and_the_cpu_goes_on(sessions: dict[str, Any], name: str, reason: str) -> None:
    """From the keys and values that the array made: every step before and after has its logits."""
    found = sessions["error, cpu" if name == "error" else name]
    (error,) = found["errors"]
    assert "decode_layer, layers 0-5, position 72" in error
    assert reason in error
    assert "next runs are on its CPU" in error
    top = np.array(found["top"])
    assert top.shape == (STEPS, 4096)
    # Before it failed, the array's; afterwards the CPU's, from the array's cache.
    assert found["top"][:FAILED_AT] == sessions["well"]["top"][:FAILED_AT]
    expected = np.array(sessions["cpu"]["top"])
    assert np.sqrt(np.square(top - expected).mean()) < expected.std() / 20
    assert found["top"][FAILED_AT:] != sessions["well"]["top"][FAILED_AT:]


def test_without_leave_to_use_the_cpu_each_run_says_what_failed_first(sessions: dict[str, Any]) -> None:
    found = sessions["error"]
    assert len(found["top"]) == FAILED_AT
    assert len(found["errors"]) == 2 * (STEPS - FAILED_AT)
    assert all("decode_layer, layers 0-5, position 72" in error for error in found["errors"])
    assert "on_unsupported=cpu" in found["errors"][0]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("no device", "XRT finds no NPU"),
        ("permission", "sudo usermod -aG render"),
        ("memory", "Cannot allocate memory"),
    ],
)
def test_a_session_that_cannot_be_made_says_why(sessions: dict[str, Any], name: str, reason: str) -> None:
    assert "FlowNPU" in sessions[name]["refused"]
    assert reason in sessions[name]["refused"]
