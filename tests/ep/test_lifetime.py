# SPDX-License-Identifier: Apache-2.0
"""Who outlives whom, and what may happen at the same time."""

from __future__ import annotations

import concurrent.futures
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import numpy as np
import onnxruntime
import pytest

from tests.ep.conftest import parse, reference

if TYPE_CHECKING:
    from pathlib import Path

    from tests.ep.conftest import MakeSession

MODEL = "g (float[N] x, float[N] y) => (float[N] z) { a = Add(x, y)  b = Mul(a, x)  c = Add(b, a)  z = Mul(c, c) }"


def test_runs_of_one_session_may_overlap(make_session: MakeSession) -> None:
    session = make_session(MODEL, strict=True)

    def work(thread: int) -> None:
        for turn in range(200):
            # Sizes differ between threads and turns, so that every workspace grows while others are in use.
            x = np.full(1 + (thread * 37 + turn * 11) % 500, thread + 1, np.float32)
            (z,) = session.run(None, {"x": x, "y": x})
            np.testing.assert_array_equal(z, (2 * x * x + 2 * x) ** 2)

    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        for done in [threads.submit(work, thread) for thread in range(4)]:
            done.result()


def test_a_library_may_be_unregistered_while_its_sessions_live(library: Path, tmp_path: Path) -> None:
    # A copy, so that no other registration keeps the library loaded.
    copy = shutil.copy(library, tmp_path)
    name = "unregistered while sessions live"
    onnxruntime.register_execution_provider_library(name, copy)
    devices = [device for device in onnxruntime.get_ep_devices() if device.ep_metadata.get("library_path") == copy]
    options = onnxruntime.SessionOptions()
    options.add_provider_for_devices(devices, {})
    session = onnxruntime.InferenceSession(parse(MODEL).SerializeToString(), options)
    del devices, options
    onnxruntime.unregister_execution_provider_library(name)
    x = np.arange(3, dtype=np.float32)
    (z,) = session.run(None, {"x": x, "y": x})
    np.testing.assert_array_equal(z, reference(MODEL, {"x": x, "y": x})[0])
    del session


def test_registering_twice_under_one_name_is_an_error(library: Path) -> None:
    name = "registered twice"
    onnxruntime.register_execution_provider_library(name, str(library))
    with pytest.raises(Exception, match="already registered"):
        onnxruntime.register_execution_provider_library(name, str(library))
    onnxruntime.unregister_execution_provider_library(name)


def test_sessions_come_and_go(make_session: MakeSession) -> None:
    x = np.arange(3, dtype=np.float32)
    expected = reference(MODEL, {"x": x, "y": x})[0]
    sessions = [make_session(MODEL) for _ in range(5)]
    for _ in range(5):
        sessions.pop(0)
        sessions.append(make_session(MODEL))
        for session in sessions:
            np.testing.assert_array_equal(session.run(None, {"x": x, "y": x})[0], expected)


def test_a_process_may_end_with_a_session_alive(library: Path) -> None:
    # Only a process of its own can end. It leaves the session, the threads and the registration as they are.
    script = f"""
import numpy, onnxruntime
onnxruntime.register_execution_provider_library("flownpu", {str(library)!r})
options = onnxruntime.SessionOptions()
options.add_provider_for_devices(
    [d for d in onnxruntime.get_ep_devices() if d.ep_name == "FlowNPUExecutionProvider"], {{}})
session = onnxruntime.InferenceSession({parse(MODEL).SerializeToString()!r}, options)
session.run(None, {{"x": numpy.ones(3, "f"), "y": numpy.ones(3, "f")}})
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_library_exports_its_two_entry_points_and_no_more(library: Path) -> None:
    done = subprocess.run(
        ["nm", "--dynamic", "--defined-only", str(library)], capture_output=True, text=True, check=True
    )
    assert {line.split()[-1] for line in done.stdout.splitlines()} == {"CreateEpFactories", "ReleaseEpFactory"}
