# SPDX-License-Identifier: Apache-2.0
"""A worker answers, passes on exceptions, and survives crashes and hangs of what it runs."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fuzz.worker import Crashed, Hung, Raised, Worker


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    with Worker() as made:
        yield made


def test_call_returns_result(worker: Worker) -> None:
    assert worker.call("math:hypot", 3.0, 4.0) == 5.0
    assert len(worker.call("os:urandom", 1 << 20)) == 1 << 20  # more than a pipe holds


def test_exception_in_worker_is_raised_in_caller(worker: Worker) -> None:
    with pytest.raises(Raised, match="ValueError") as raised:
        worker.call("math:sqrt", -1.0)
    assert raised.value.kind == "ValueError"
    assert raised.value.message


def test_crash_is_reported_and_worker_restarts(worker: Worker) -> None:
    with pytest.raises(Crashed) as crashed:
        worker.call("os:abort")
    assert crashed.value.reason == "ended by SIGABRT"
    assert "os:abort" in crashed.value.report or "Fatal Python error: Aborted" in crashed.value.report
    assert worker.call("math:hypot", 3.0, 4.0) == 5.0


def test_exit_restarts_worker(worker: Worker) -> None:
    with pytest.raises(Crashed, match="exit code 3"):
        worker.call("os:_exit", 3)
    assert worker.call("math:hypot", 3.0, 4.0) == 5.0


def test_hanging_call_restarts_worker() -> None:
    with Worker(seconds=0.5) as worker:
        with pytest.raises(Hung, match=r"no answer in 0\.5 s"):
            worker.call("time:sleep", 60)
        assert worker.call("math:hypot", 3.0, 4.0) == 5.0


def test_library_that_cannot_be_loaded_is_crash(tmp_path: Path) -> None:
    with Worker(tmp_path / "none.so") as worker, pytest.raises(Crashed, match=r"none\.so"):
        worker.call("math:hypot", 3.0, 4.0)
