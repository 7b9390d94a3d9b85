# SPDX-License-Identifier: Apache-2.0
"""The CPU device's thread pool (ops/cpu/thread_pool.h): each task once, shares in order, a slow thread is helped."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

import numpy as np
import pytest

from tests.ops.device import testing


@pytest.mark.parametrize("threads", [1, 2, 3, 5])
@pytest.mark.parametrize("tasks", [0, 1, 2, 4, 5, 64, 1001])
def test_task_is_done_exactly_once(threads: int, tasks: int) -> None:
    pool = testing.ThreadPool(threads)
    assert pool.threads == threads
    for _ in range(20):
        assert sorted(chain(*pool.run(tasks))) == list(range(tasks))


def test_thread_does_own_share_in_order_and_others_from_end() -> None:
    pool, tasks = testing.ThreadPool(2), 64
    for _ in range(50):
        for done in pool.run(tasks):
            begin = 0 if done[0] < tasks // 2 else tasks // 2
            own = [index for index in done if begin <= index < begin + tasks // 2]
            others = done[len(own) :]
            assert own == list(range(begin, begin + len(own)))
            end = tasks - begin
            assert others == list(range(end - 1, end - 1 - len(others), -1))


def test_share_of_slow_thread_is_done_by_others() -> None:
    # Longer by far than it takes to wake a thread.
    lists = testing.ThreadPool(2).run(64, slow=0, milliseconds=500)
    assert sorted(chain(*lists)) == list(range(64))
    # The thread with the slow task, most likely the caller, finds no task left after it.
    assert next(done for done in lists if 0 in done)[-1] == 0


def test_jobs_inside_of_tasks_leave_other_tasks_to_other_threads() -> None:
    """A thread that runs a job inside of a task counts once among those that compute, so a worker still joins."""
    assert testing.ThreadPool(max(2, len(os.sched_getaffinity(0)))).inner_jobs_meet()


@pytest.mark.parametrize("rows", [0, 1, 7, 16, 100, 1000])
def test_row_is_done_exactly_once(rows: int) -> None:
    assert sorted(chain(*testing.ThreadPool(2).run_rows(rows))) == list(range(rows))


def test_simultaneous_callers_get_all_tasks_done() -> None:
    pool = testing.ThreadPool(2)
    with ThreadPoolExecutor(4) as callers:
        runs = [callers.submit(lambda: [pool.run(100) for _ in range(50)]) for _ in range(4)]
    for run in runs:
        for done in run.result():
            assert sorted(chain(*done)) == list(range(100))


# No stream; an empty one; several; more than a pool remembers; more bytes than it fetches.
@pytest.mark.parametrize("sizes", [[], [0], [1, 1000, 0, 1 << 20], [100] * 40, [20 << 20, 1000]])
def test_expected_streams_are_not_changed(sizes: list[int]) -> None:
    pool, expected = testing.ThreadPool(3), [np.arange(size).astype(np.uint8) for size in sizes]
    before = [stream.copy() for stream in expected]
    for _ in range(20):
        pool.expect(expected)
        assert sorted(chain(*pool.run(30))) == list(range(30))
    for stream, was in zip(expected, before, strict=True):
        np.testing.assert_array_equal(stream, was)


def test_freed_expected_streams_cause_no_error() -> None:
    pool = testing.ThreadPool(2)
    for _ in range(20):
        pool.expect([np.zeros(16 << 20, np.uint8)])
        assert sorted(chain(*pool.run(30))) == list(range(30))


CORES = sorted(os.sched_getaffinity(0))
two_cores = pytest.mark.skipif(len(CORES) < 2, reason="this process may run on one processor alone")


@contextmanager
def caller_on(core: int) -> Iterator[None]:
    try:
        os.sched_setaffinity(0, {core})
        yield
    finally:
        os.sched_setaffinity(0, CORES)


def threads() -> set[int]:
    return {int(task.name) for task in Path("/proc/self/task").iterdir()}


def sleeps(thread: int) -> int:
    """The number of times that a thread has gone to sleep."""
    status = Path(f"/proc/self/task/{thread}/status").read_text(encoding="utf-8")
    return int(status.split("voluntary_ctxt_switches:")[1].split()[0])


@two_cores
def test_worker_whose_task_was_interrupted_sleeps_between_jobs() -> None:
    """The interruption is a task that takes 20 ms between tasks of microseconds; the jobs after it follow at once."""
    before = threads()
    pool = testing.ThreadPool(2)
    (worker,) = threads() - before

    def sleeps_of_jobs() -> int:
        pool.run(64, slow=40, milliseconds=20)  # task 40 is the worker's, unless the system wakes it too late
        slept = sleeps(worker)
        pool.seconds_of_jobs(200, 100)
        return sleeps(worker) - slept

    # A worker that spins does so for longer than there is between two jobs, and sleeps after the last alone. On a
    # machine with other work a worker that sleeps may miss the jobs of a try.
    assert any(sleeps_of_jobs() > 20 for _ in range(50))


# Two cores; two threads of one core, which are taken if more threads are asked for than there are cores.
@two_cores
@pytest.mark.parametrize("cores", [(0, 1), (0, 0)])
def test_worker_is_kept_off_core_of_caller(cores: tuple[int, int]) -> None:
    before = threads()
    pool = testing.ThreadPool(2, [(CORES[0], cores[0], 1024), (CORES[1], cores[1], 1024)])
    (worker,) = threads() - before
    for mine, other in (CORES[:2], CORES[1::-1], CORES[:2]):
        with caller_on(mine):
            assert sorted(chain(*pool.run(64))) == list(range(64))
        assert os.sched_getaffinity(worker) == {other}


def test_pool_larger_than_processors_pins_no_worker() -> None:
    before = threads()
    pool = testing.ThreadPool(3, [(CORES[0], 0, 1024), (CORES[0], 0, 1024)])
    workers = threads() - before
    assert [os.sched_getaffinity(worker) for worker in workers] == [set(CORES)] * 2
    assert sorted(chain(*pool.run(64))) == list(range(64))


def first_of_the_worker(pool: testing.ThreadPool) -> int:
    """Where the worker's share of 60 tasks begins, while the caller, on the first core, is held up by task 0."""
    with caller_on(CORES[0]):
        while True:  # until the worker wakes up, while task 0 holds up the caller
            caller, *workers = pool.run(60, slow=0, milliseconds=50)
            if caller == [0]:
                return workers[0][0]


@two_cores
def test_shares_are_as_cores_are_fast_and_then_as_they_were() -> None:
    with caller_on(CORES[0]):
        pool = testing.ThreadPool(2, [(CORES[0], 0, 1024), (CORES[1], 1, 512)])
    begins = [first_of_the_worker(pool) for _ in range(16)]
    # At first 60 x 1024 / (1024 + 512). The caller does 1 of 60 each time, and its share moves an eighth of the way
    # there: 39 x (7 / 8)^15 + 1 is 6.3; twice that, for times when the worker woke up late.
    assert begins[0] == 40
    assert begins[-1] <= 12


@two_cores
def test_shares_of_equal_cores_stay_equal() -> None:
    with caller_on(CORES[0]):
        pool = testing.ThreadPool(2, [(CORES[0], 0, 1024), (CORES[1], 1, 1024)])
    assert {first_of_the_worker(pool) for _ in range(10)} == {30}
