# SPDX-License-Identifier: Apache-2.0
"""Processes that are forked after a session was made, like the workers of gunicorn and of torch's DataLoader."""

import os
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from flownpu import ops
from flownpu.ops.q4nx_quantize import quantize
from tests.ep.conftest import MakeSession, reference
from tests.forked import in_child

pytestmark = [
    pytest.mark.skipif(sys.platform == "win32", reason="Windows cannot fork a process"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning"),
]

THREADS = 3
MODEL = "g (float[N,256] x) => (float[N,256] y) { a = Softmax (x)  b = Mul (a, x)  y = Softmax (b) }"
X = np.random.default_rng(0).standard_normal((64, 256)).astype(np.float32)


def threads_now() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def release(sessions: list[Any]) -> str:
    sessions.clear()
    return "released"


def check(session: Any) -> None:
    np.testing.assert_allclose(session.run(None, {"x": X})[0], reference(MODEL, {"x": X})[0], rtol=1e-5)


def test_fork_session_of_parent_runs_on_all_threads_and_processors(make_session: MakeSession) -> None:
    session = make_session(MODEL, {"threads": str(THREADS)}, configure={"intra_op_num_threads": 1})
    expected = session.run(None, {"x": X})[0]
    allowed = os.sched_getaffinity(0)

    def work() -> tuple[int, int, bool, set[int]]:
        before = threads_now()
        # Often enough for the system to move this thread to another core, from which a worker has to move then.
        same = all(np.array_equal(session.run(None, {"x": X})[0], expected) for _ in range(300))
        return before, threads_now(), same, os.sched_getaffinity(0)

    before, after, same, allowed_in_child = in_child(work)
    assert before == 1
    assert after == THREADS
    assert same
    assert allowed_in_child == allowed
    check(session)


def test_fork_new_session_computes_with_all_threads(make_session: MakeSession) -> None:
    session = make_session(MODEL, {"threads": str(THREADS)})
    check(session)

    def work() -> int:
        check(make_session(MODEL, {"threads": str(THREADS)}, configure={"intra_op_num_threads": 1}))
        return threads_now()

    assert in_child(work) == THREADS


def test_fork_while_another_thread_computes_child_runs(make_session: MakeSession) -> None:
    """The pool's caller and workers are in the middle of a job, for which the child must not wait."""
    session = make_session(MODEL, {"threads": str(THREADS)})
    stop = threading.Event()

    def compute() -> None:
        while not stop.is_set():
            session.run(None, {"x": X})

    thread = threading.Thread(target=compute)
    thread.start()
    try:
        # The test's own child runs another session: the lock of a workspace may be held by `thread` at any moment.
        for _ in range(10):
            assert in_child(lambda: make_session(MODEL, {"threads": str(THREADS)}) and threads_now()) >= 1
    finally:
        stop.set()
        thread.join()


def test_fork_of_fork_computes_with_all_threads(make_session: MakeSession) -> None:
    session = make_session(MODEL, {"threads": str(THREADS)})

    def work() -> int:
        check(session)
        return threads_now()

    assert in_child(lambda: in_child(work)) == THREADS


def test_fork_child_releases_parents_session(make_session: MakeSession) -> None:
    """The child has no workers to join. (ORT would join its own, and wait forever.)"""
    sessions = [make_session(MODEL, {"threads": str(THREADS)}, configure={"intra_op_num_threads": 1})]
    check(sessions[0])
    assert in_child(lambda: release(sessions)) == "released"
    check(sessions[0])


def test_fork_functions_on_arrays_compute_same() -> None:
    """flownpu._native has a separate pool of the same kind."""
    x, w = product()
    expected = ops.q4nx_matmul(x, w)
    np.testing.assert_array_equal(in_child(lambda: ops.q4nx_matmul(x, w)), expected)


@pytest.mark.opencl
@pytest.mark.usefixtures("pocl")
def test_device_opened_before_fork_is_refused_in_child() -> None:
    """The child lacks its driver's threads, so the first wait would not end."""
    x, w = product()
    expected = ops.q4nx_matmul(x, w, device="gpu")
    assert "[FlowNPU] device 'gpu' was opened before this process was forked" in in_child(
        lambda: ops.q4nx_matmul(x, w, device="gpu")
    )
    np.testing.assert_array_equal(ops.q4nx_matmul(x, w, device="gpu"), expected)


@pytest.mark.opencl
@pytest.mark.usefixtures("pocl")
def test_fork_child_releases_parents_device_session(make_session: MakeSession) -> None:
    options = {"device": "gpu", "on_unsupported": "cpu"}
    sessions = [make_session(MODEL, options, configure={"intra_op_num_threads": 1})]
    check(sessions[0])
    assert in_child(lambda: release(sessions)) == "released"
    check(sessions[0])


def product() -> tuple[NDArray[Any], NDArray[Any]]:
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((256, 256)).astype(np.float32)
    return rng.standard_normal((64, 256)).astype(np.float32), ops.q4nx.pack(*quantize(weight))
