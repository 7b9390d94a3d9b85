# SPDX-License-Identifier: Apache-2.0
"""Lifetimes of the library, its sessions and their threads, and runs at the same time."""

import concurrent.futures
import gc
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import onnxruntime
import pytest

from tests.ep.conftest import MakeSession, parse, reference

MODEL = "g (float[N] x, float[N] y) => (float[N] z) { a = Add(x, y)  b = Mul(a, x)  c = Add(b, a)  z = Mul(c, c) }"


def test_overlapping_runs_of_session_compute_same(make_session: MakeSession) -> None:
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


def test_unregistered_library_keeps_sessions_running(library: Path, tmp_path: Path) -> None:
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


def test_registering_twice_under_one_name_is_error(library: Path) -> None:
    name = "registered twice"
    onnxruntime.register_execution_provider_library(name, str(library))
    with pytest.raises(Exception, match="already registered"):
        onnxruntime.register_execution_provider_library(name, str(library))
    onnxruntime.unregister_execution_provider_library(name)


def test_repeated_sessions_compute_same(make_session: MakeSession) -> None:
    x = np.arange(3, dtype=np.float32)
    expected = reference(MODEL, {"x": x, "y": x})[0]
    sessions = [make_session(MODEL) for _ in range(5)]
    for _ in range(5):
        sessions.pop(0)
        sessions.append(make_session(MODEL))
        for session in sessions:
            np.testing.assert_array_equal(session.run(None, {"x": x, "y": x})[0], expected)


def test_process_ends_cleanly_with_session_alive(library: Path) -> None:
    # In a process of its own, which ends with the session, the threads and the registration alive.
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


def test_library_exports_two_entry_points(library: Path) -> None:
    done = subprocess.run(
        ["nm", "--dynamic", "--defined-only", str(library)], capture_output=True, text=True, check=True
    )
    assert {line.split()[-1] for line in done.stdout.splitlines()} == {"CreateEpFactories", "ReleaseEpFactory"}


def threads_of_process() -> set[int]:
    gc.collect()  # Sessions in the frames of a caught exception keep their threads until then.
    return {int(task.name) for task in Path("/proc/self/task").iterdir()}


def test_sessions_share_their_threads(make_session: MakeSession) -> None:
    # ONNX Runtime's own pools would count as well.
    configure = {"intra_op_num_threads": 1, "inter_op_num_threads": 1}
    others = threads_of_process()  # Those may end meanwhile, if an earlier test left something behind.
    first = make_session(MODEL, {"threads": "3"}, configure=configure)
    workers = threads_of_process() - others
    assert len(workers) == 2
    more = [make_session(MODEL, {"threads": "3"}, configure=configure) for _ in range(3)]
    assert threads_of_process() - others == workers
    del more, first
    end = time.monotonic() + 60
    while threads_of_process() & workers:  # Linux still lists a thread for a moment after it was joined.
        assert time.monotonic() < end, "the last session has gone, and its threads have not"


def test_sessions_on_pools_of_all_sizes_compute_at_once(make_session: MakeSession) -> None:
    # More callers and workers than cores, with tasks enough for all of them.
    sessions = [make_session(MODEL, {"threads": str(threads)}, strict=True) for threads in (1, 2, 2, 3, 8)]
    x = np.arange(300_000, dtype=np.float32) % 7

    def work(session: onnxruntime.InferenceSession) -> None:
        for _ in range(30):
            (z,) = session.run(None, {"x": x, "y": x})
            np.testing.assert_array_equal(z, (2 * x * x + 2 * x) ** 2)

    with concurrent.futures.ThreadPoolExecutor(len(sessions)) as threads:
        for done in [threads.submit(work, session) for session in sessions]:
            done.result()


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core: there is no other for a worker")
def test_workers_stay_off_core_of_their_caller(make_session: MakeSession) -> None:
    # Without this, Linux wakes a worker on the caller's core, where the two would take turns.
    cores = os.sched_getaffinity(0)
    x = np.ones(300_000, np.float32)
    before = threads_of_process()
    session = make_session(MODEL, {"threads": str(len(cores))}, configure={"intra_op_num_threads": 1})
    workers = threads_of_process() - before
    try:
        if not workers:  # An earlier session started the pool: its threads are those that move with the caller.
            bound = []
            for core in sorted(cores)[:2]:
                os.sched_setaffinity(0, {core})
                session.run(None, {"x": x, "y": x})
                threads = threads_of_process() - {threading.get_native_id()}
                bound.append({thread: os.sched_getaffinity(thread) for thread in threads})
            workers = {thread for thread in bound[0] if bound[0][thread] != bound[1].get(thread)}
        assert len(workers) == len(cores) - 1
        for core in sorted(cores):
            os.sched_setaffinity(0, {core})
            session.run(None, {"x": x, "y": x})
            assert set().union(*map(os.sched_getaffinity, workers)) == cores - {core}
            assert sum(len(os.sched_getaffinity(worker)) for worker in workers) == len(cores) - 1
    finally:
        os.sched_setaffinity(0, cores)
