# SPDX-License-Identifier: Apache-2.0
"""Results do not depend on the order of events; if a program has a race, some schedule shows it."""

import dataclasses

import numpy as np
import pytest

from flownpu.aie.plan.data import Await, Free, Release, SetBarrier, Transfer, WriteParameter
from tests.aie.designs.small_cases import SERIES, SMALL_CASES, cases_of
from tests.aie.emulation import emulate, emulator
from tests.aie.small_programs import chain, split_and_join, with_body, with_steps


@pytest.mark.parametrize("design", SMALL_CASES)
def test_hundred_schedules_equal_reference(rng, design):
    """Each runs on the array as the one before left it."""
    cases_of(design, rng)[-1].fuzz(range(1, 101))


def order(seed):
    """The order in which four cores that share a stream call their kernels."""
    calls = []

    def add(x, y, number):
        calls.append(number)
        np.add(x, number, out=y)

    emulate(split_and_join(4), functions={"add": add}, seed=seed, x=np.arange(12 * 64, dtype=np.int32))
    return tuple(calls)


def test_schedules_differ_by_seed_and_repeat():
    orders = [order(seed) for seed in range(20)]
    assert orders == [order(seed) for seed in range(20)]
    assert len(set(orders)) > 10
    assert any(late[-3:] == (0, 0, 0) for late in map(order, range(1, 200, 2))), "a core that is long not scheduled"


# --- Races ------------------------------------------------------------------------------------------------------------


def results(plan, seeds, **inputs):
    """The result of each schedule: the output's bytes, or the beginning of the error's message."""
    found = []
    for seed in seeds:
        try:
            found.append(
                emulate(plan, functions={"scale": scale}, checked=False, seed=seed, **inputs)["target"].tobytes()
            )
        except (RuntimeError, AssertionError) as error:
            found.append(str(error)[:60])
    return found


def scale(x, y, factor):
    y[:] = x * factor


SOURCE = np.arange(1, 257, dtype=np.int32)


def test_parameter_written_while_core_runs_changes_results():
    """After its start the core reads the number of objects, before or after the change by chance."""
    plan = chain()
    steps = list(plan.sequence.steps)
    after = next(place for place, step in enumerate(steps) if isinstance(step, SetBarrier)) + 1
    changed = dataclasses.replace(next(s for s in steps if isinstance(s, WriteParameter)), value=3)
    found = results(with_steps(plan, *steps[:after], changed, *steps[after:]), range(50), source=SOURCE)
    assert (3 * SOURCE).tobytes() in found
    assert any(isinstance(text, str) and "deadlock" in text for text in found)


def test_lost_start_is_found():
    """The barrier is set again before the core has finished its first pass: in some schedules it makes only one."""
    plan = chain(2)
    start = [s for s in plan.sequence.steps if isinstance(s, (WriteParameter, SetBarrier))]
    moves = [s for s in plan.sequence.steps if isinstance(s, Transfer)]
    ends = [s for s in plan.sequence.steps if isinstance(s, (Await, Free))]
    halves = [dataclasses.replace(s, tap=dataclasses.replace(s.tap, walk=s.tap.walk)) for s in moves]
    again = [dataclasses.replace(s, name=f"{s.name}_again") for s in halves]
    last = [dataclasses.replace(s, transfer=f"{s.transfer}_again") for s in ends]
    source = np.arange(1, 129, dtype=np.int32)
    waits = with_steps(plan, *start, *moves, *ends, *start, *again, *last)
    assert set(results(waits, range(50), source=source)) == {(3 * source).tobytes()}
    hurries = with_steps(plan, *start, *start, *moves, *again, *ends, *last)
    found = results(hurries, range(50), source=source)
    assert any(isinstance(text, str) and "deadlock" in text for text in found)


def test_output_read_before_await_is_found():
    """The call's second half reads results of its first half; without a wait, some schedules read earlier contents."""
    plan = chain(2)
    fill, drain = (s for s in plan.sequence.steps if isinstance(s, Transfer))
    start = [s for s in plan.sequence.steps if isinstance(s, (WriteParameter, SetBarrier))]
    again = dataclasses.replace(fill, name="again", buffer="target"), dataclasses.replace(drain, name="back")
    ends = [Await(drain.name), Await("back"), Free(fill.name), Free("again")]
    source = np.arange(1, 129, dtype=np.int32)
    waits = with_steps(plan, *start, fill, drain, Await(drain.name), *start, *again, *ends[1:])
    assert set(results(waits, range(50), source=source)) == {(9 * source).tobytes()}
    start = [dataclasses.replace(s, value=4) if isinstance(s, WriteParameter) else s for s in start]
    found = results(with_steps(plan, *start, fill, drain, *again, *ends), range(50), source=source)
    assert len(set(found)) > 1


def test_object_released_before_read_is_found():
    def release_first(body):
        release = next(s for s in body if isinstance(s, Release) and s.port == "consume")
        call_first = [s for s in body if s is not release]
        return [*call_first[:2], release, *call_first[2:]]

    found = results(with_body(chain(), release_first), range(5), source=SOURCE)
    assert all(bytes_found != (3 * SOURCE).tobytes() for bytes_found in found)


# --- Calls that follow each other at once -----------------------------------------------------------------------------


def wrong_schedules(cases, seeds, *, settle):
    """The schedules under which consecutive calls go wrong."""
    wrong = []
    for seed in seeds:
        array = emulator(cases[0].plan.array)
        try:
            for case in cases:
                case.check(array, seed=seed, settle=settle)
            assert not settle or array.leftovers() == []
        except (RuntimeError, AssertionError):
            wrong.append(seed)
    return wrong


@pytest.mark.parametrize("design", SERIES)
def test_calls_of_other_shapes_need_no_time_between_them(rng, design):
    """A core without work may be late: it must not mistake the start of the next call for its own."""
    cases = SERIES[design](rng)
    assert all(case.plan.array == cases[0].plan.array for case in cases)
    assert wrong_schedules(cases, range(30), settle=False) == []


@pytest.mark.parametrize("design", ["fused_dqp", "rms_norm"])
def test_early_parameter_write_is_found(rng, design):
    """If consecutive calls do not wait for what all cores share, a core that was idle before misses its start."""

    def early(plan):
        first = [s for s in plan.sequence.steps if isinstance(s, (WriteParameter, SetBarrier))]
        return with_steps(plan, *first, *(s for s in plan.sequence.steps if s not in first))

    cases = [dataclasses.replace(case, plan=early(case.plan)) for case in SERIES[design](rng)]
    assert wrong_schedules(cases, range(30), settle=True) == []
    assert wrong_schedules(cases, range(30), settle=False) != []
