# SPDX-License-Identifier: Apache-2.0
"""The steps of a partition appear as events in ORT's JSON profile."""

import json
import threading
from pathlib import Path
from typing import Any

import numpy as np

from tests.ep.conftest import MakeSession

MODEL = "g (float[N] x) => (float[N] z) { [first] a = Add(x, x)  [second] z = Mul(a, x) }"


# Sizes of the values in multiples of N: a 2, b 4, c 4, d 8; few elements of b are kept until the end.
OF_SEVERAL_SIZES = """
g (float[N] x) => (float[M] y) <int64[1] first = {0}, int64[1] end = {16}> {
  a = Concat <axis = 0> (x, x)
  b = Concat <axis = 0> (a, a)
  kept = Slice (b, first, end)
  after = Slice (kept, first, first)
  c = Concat <axis = 0> (x, x, after, x, x)
  d = Concat <axis = 0> (c, c)
  y = Concat <axis = 0> (d, kept)
}
"""


def profile(
    make_session: MakeSession, folder: Path, threads: int, runs: int, model: str = MODEL
) -> list[dict[str, Any]]:
    configure = {"enable_profiling": True, "profile_file_prefix": str(folder / "profile")}
    session = make_session(model, configure=configure)

    def work() -> None:
        for _ in range(runs):
            session.run(None, {"x": np.ones(50_000, np.float32)})

    workers = [threading.Thread(target=work) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    events: list[dict[str, Any]] = json.loads(Path(session.end_profiling()).read_text())
    return events


def test_profile_has_event_for_each_step(make_session: MakeSession, tmp_path: Path) -> None:
    events = profile(make_session, tmp_path, threads=1, runs=3)
    ours = [event for event in events if event["cat"] == "Kernel"]
    assert [(event["name"], event["args"]["op_name"]) for event in ours] == [("first", "Add"), ("second", "Mul")] * 3
    for event in ours:
        assert event["args"]["provider"] == "FlowNPUExecutionProvider"
        assert event["args"]["device"] == "cpu"
        assert event["args"]["output_shapes"] == [[50_000]]


def test_run_holds_what_is_needed_and_next_ones_share_slots_by_size(make_session: MakeSession, tmp_path: Path) -> None:
    """No size is known before a run, so that the first one allocates as it goes.

    Then the largest value chooses first: b lies where d will, a where c will, `kept` by itself, and `after`, which has
    no elements, anywhere.
    """
    events = profile(make_session, tmp_path, threads=1, runs=3, model=OF_SEVERAL_SIZES)
    held = [int(event["args"]["bytes_held"]) for event in events if event["cat"] == "Kernel"]
    n, kept, empty = 4 * 50_000, 4 * 16, 64  # the least that is allocated
    few = kept + empty
    assert held[:7] == [2 * n, 6 * n, 4 * n + kept, few, 4 * n + few, 12 * n + kept, 8 * n + kept]
    assert held[7:] == [12 * n + kept] * 14


def test_events_are_on_clock_of_profile(make_session: MakeSession, tmp_path: Path) -> None:
    def inside(step: dict[str, Any], partition: dict[str, Any]) -> bool:
        # All times are truncated to whole microseconds.
        end = partition["ts"] + partition["dur"] + 2
        return bool(partition["ts"] - 1 <= step["ts"] and step["ts"] + step["dur"] <= end)

    def all_inside() -> bool:
        events = profile(make_session, tmp_path, threads=1, runs=1)
        (partition,) = (event for event in events if event["name"].endswith("_kernel_time"))
        steps = [event for event in events if event["cat"] == "Kernel"]
        return all(inside(step, partition) and step["tid"] == partition["tid"] for step in steps)

    # The two clocks are compared once a session; a thread that is interrupted just then measures a wrong offset.
    assert any(all_inside() for _ in range(10))


def test_events_of_concurrent_runs_are_complete(make_session: MakeSession, tmp_path: Path) -> None:
    events = profile(make_session, tmp_path, threads=3, runs=20)
    ours = [event["name"] for event in events if event["cat"] == "Kernel"]
    assert (ours.count("first"), ours.count("second")) == (60, 60)


def test_session_without_profiling_is_in_no_profile(make_session: MakeSession, tmp_path: Path) -> None:
    profiled = make_session(
        MODEL, configure={"enable_profiling": True, "profile_file_prefix": str(tmp_path / "profile")}
    )
    other = make_session(MODEL.replace("[first]", "[other]"))
    for session in (profiled, other):
        session.run(None, {"x": np.ones(3, np.float32)})
    names = [event["name"] for event in json.loads(Path(profiled.end_profiling()).read_text())]
    assert (names.count("first"), names.count("other")) == (1, 0)
