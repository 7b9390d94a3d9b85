# SPDX-License-Identifier: Apache-2.0
"""Faults of run-time sequences: taps, queues, live descriptors.

Each rule is broken once; the message names the place, the need and the finding.
"""

import dataclasses

import pytest

from flownpu.aie.check.sequence import check_sequence
from flownpu.aie.plan.data import Await, Dimension, Free, HostBuffer, SetBarrier, Tap, Transfer, Type, WriteParameter
from flownpu.aie.plan.limits import NPU2 as LIMITS
from tests.aie.check.faults import BUFFER, CHAIN, DRAIN, FILL, STEPS, messages, tasks, walked
from tests.aie.small_programs import with_array, with_step, with_steps


def tapped(offset, *walk, elements=256, dtype="i32"):
    """The chain's fill with another tap, from a host buffer of `elements`."""
    plan = walked([(4, 16), (16, 1)], dtype=dtype)
    host = (HostBuffer("source", Type((elements,), dtype)), plan.sequence.buffers[1])
    plan = dataclasses.replace(plan, sequence=dataclasses.replace(plan.sequence, buffers=host))
    return with_step(plan, Transfer, tap=Tap(offset, tuple(Dimension(*d) for d in walk)))


BIG = 1 << 28
SEQUENCES = {
    "past the end": (
        tapped(4, (256, 1)),
        "[transfer a_task0] last element of host buffer source: need 259, have 0..255",
    ),
    "offset in the middle of a word": (
        tapped(1, (254, 1), dtype="bf16"),
        "offset: need a multiple of 4 bytes, have 1 x 2 bytes",
    ),
    "five dimensions": (
        tapped(0, (2, 128), (2, 64), (2, 32), (2, 8), (16, 1), elements=BIG),
        "dimensions: need 5, have 4 (with the iteration)",
    ),
    "iteration": (
        tapped(0, (65, 256), (2, 128), (2, 64), (2, 1), elements=BIG),
        "iteration: need 65, have 64 (outermost dimension)",
    ),
    "iteration stride": (
        tapped(0, (2, (1 << 20) + 1), (2, 128), (2, 64), (2, 1), elements=BIG),
        "stride of the iteration in words: need 1048577, have 1048576",
    ),
    "iteration stride in words": (
        tapped(0, (2, 129), (2, 64), (2, 8), (2, 1), elements=BIG, dtype="bf16"),
        "stride of the iteration: need a multiple of 4 bytes, have 258 bytes",
    ),
    "stride 0 inside": (tapped(0, (2, 128), (2, 0), (64, 1)), "stride: need 1 or more, but for the outermost"),
    "stride": (
        tapped(0, (4, (1 << 20) + 1), (64, 1), elements=BIG),
        "stride of dimension 0 in words: need 1048577, have 1048576",
    ),
    "stride in words": (tapped(0, (4, 65), (64, 1), elements=BIG, dtype="bf16"), "have 65 x 2 bytes"),
    "innermost size": (
        tapped(0, (2, 4096), (1024, 1), elements=BIG),
        "size of dimension 1 in words: need 1024, have 1023",
    ),
    "second size": (
        tapped(0, (1, 1), (1024, 4096), (64, 1), (1, 1), elements=BIG),
        "size of dimension 0 in words: need 1024, have 1023",
    ),
    "bf16 by twos": (
        tapped(0, (128, 2), elements=BIG, dtype="bf16"),
        "innermost stride: need 1, have 2 (elements of 2 bytes, words of 4)",
    ),
    "odd length": (tapped(0, (63, 1), dtype="bf16"), "length: need a multiple of 4 bytes, have 63 x 2 bytes"),
    "long": (tapped(0, (1 << 32, 1), elements=1 << 33), "length in words: need 4294967296, have 4294967295"),
    "half an object": (tapped(0, (96, 1)), "elements for fifo a: need whole objects of 64 elements, have 96"),
    "other type": (
        dataclasses.replace(
            CHAIN,
            sequence=dataclasses.replace(
                CHAIN.sequence, buffers=(HostBuffer("source", Type((256,), "f32")), CHAIN.sequence.buffers[1])
            ),
        ),
        "element type: need 64xi32, have 256xf32",
    ),
    "no such fifo": (
        with_steps(CHAIN, dataclasses.replace(FILL, name="other", fifo="b"), *STEPS),
        "[transfer other] an end of fifo b at a shim tile: need 1, have 0",
    ),
    "parameter index": (
        with_step(CHAIN, WriteParameter, index=16),
        "[run-time parameter parameters] index: need 16, have 0..15",
    ),
    "parameter name": (
        with_step(CHAIN, WriteParameter, buffer="x"),
        "a buffer for run-time parameters: need 1, have 0",
    ),
    "parameter of 16 bits": (
        with_array(
            with_step(CHAIN, WriteParameter, buffer="extra"),
            buffers=(
                *CHAIN.array.buffers,
                dataclasses.replace(BUFFER, type=Type((4,), "i16"), run_time_parameter=True),
            ),
        ),
        "[run-time parameter extra] element type: need 32-bit words, have 4xi16",
    ),
    "parameter value": (with_step(CHAIN, WriteParameter, value=1 << 32), "value: need 4294967296, have 32 bits"),
    "barrier value": (with_step(CHAIN, SetBarrier, value=64), "[barrier barrier0_0_2] value: need 64, have 0..63"),
    "wait without a token": (
        with_steps(CHAIN, *[dataclasses.replace(s, token=False) if s is DRAIN else s for s in STEPS]),
        "[transfer c_task1] a token to await: need 1, have 0 (start it with wait=True)",
    ),
    "awaited twice": (
        with_steps(CHAIN, *STEPS, Await("c_task1")),
        "[transfer c_task1] ends: need 2, have 1 (awaited or freed before)",
    ),
    "freed while live": (
        with_steps(CHAIN, *STEPS[:-2], STEPS[-1], STEPS[-2]),
        "[transfer a_task0] completion known before Free: need yes, have no (await it, or a drain of its data",
    ),
    "never awaited": (
        with_steps(CHAIN, *STEPS[:-2]),
        "[transfer c_task1] an Await or a Free before the sequence ends: need 1, have 0",
    ),
}


@pytest.mark.parametrize("case", SEQUENCES)
def test_faulty_sequence_is_refused(case):
    plan, message = SEQUENCES[case]
    assert any(message in text for text in messages(plan)), messages(plan)


@pytest.mark.parametrize(
    ("offset", "walk", "elements", "dtype"),
    [
        (0, [(64, 0), (4, 64), (64, 1)], 256, "i32"),  # an outermost stride of 0 repeats the task
        (0, [(2, 1 << 20), (2, 128), (2, 64), (32, 1)], BIG, "i32"),
        (0, [(1 << 16, 1)], 1 << 16, "i32"),  # neighbours need no wrap, however many
        (2, [(4, 1024), (64, 1)], BIG, "bf16"),
        (0, [(1, 0), (1, 0), (4, 1000), (64, 1)], BIG, "i32"),
    ],
)
def test_valid_taps_pass(offset, walk, elements, dtype):
    plan = tapped(offset, *walk, elements=elements, dtype=dtype)
    assert not any(text.startswith("[transfer") for text in messages(plan)), messages(plan)


def halves(*verbs):
    """The chain's data in two transfers each way. A verb is fill, drain, await or free, with the number of a half."""

    def half(step, number):
        tap = Tap(128 * number, (Dimension(128, 1),))
        return dataclasses.replace(step, name=f"{step.fifo}{number}", tap=tap)

    steps = {
        "fill": lambda number: half(FILL, number),
        "drain": lambda number: half(DRAIN, number),
        "await": lambda number: Await(f"c{number}"),
        "free": lambda number: Free(f"a{number}"),
    }
    made = [steps[verb](int(number)) for verb, number in (text.split() for text in verbs)]
    return with_steps(CHAIN, *(step for step in STEPS if isinstance(step, (WriteParameter, SetBarrier))), *made)


FREED_EARLY = "completion known before Free: need yes, have no"


@pytest.mark.parametrize(
    ("verbs", "early"),
    [
        # A fill has ended if a drain after it has, or a drain before it if no more data was filled than drained.
        (["fill 0", "drain 0", "fill 1", "drain 1", "await 0", "free 0", "await 1", "free 1"], []),
        (["drain 0", "fill 0", "drain 1", "fill 1", "await 0", "free 0", "await 1", "free 1"], []),
        (["drain 0", "drain 1", "fill 0", "fill 1", "await 0", "free 0", "await 1", "free 1"], []),
        (["drain 0", "fill 0", "drain 1", "fill 1", "await 1", "free 0", "free 1", "await 0"], []),
        # When the first half has left, the second fill need not have ended.
        (["fill 0", "drain 0", "fill 1", "drain 1", "await 0", "free 0", "free 1", "await 1"], ["a1"]),
        (["drain 0", "fill 0", "drain 1", "fill 1", "await 0", "free 1", "free 0", "await 1"], ["a1"]),
        (["drain 0", "drain 1", "fill 0", "fill 1", "free 0", "await 0", "free 1", "await 1"], ["a0", "a1"]),
    ],
)
def test_drain_before_its_fills_is_refused(verbs, early):
    found = [text for text in messages(halves(*verbs)) if FREED_EARLY in text]
    assert [text.split("]")[0] for text in found] == [f"[transfer {name}" for name in early]


def test_full_task_queue_is_refused():
    assert messages(tasks(4)) == []
    assert "[shim tile (0, 0)] tasks queued for fifo a: need 5, have 4" in messages(tasks(5))
    assert messages(tasks(100, awaited=True, step=4)) == []


def test_descriptors_are_counted_while_they_are_in_use():
    longer = dataclasses.replace(LIMITS, task_queue=64)
    assert messages(tasks(8), longer) == []
    assert "[shim tile (0, 0)] buffer descriptors live at once: need 17, have 16" in messages(tasks(9), longer)


def test_instructions_beyond_controller_heap_are_refused():
    """87 words: a header, a parameter, a barrier, two transfers, one of them with a token, and its await."""
    words = 4 + 6 + 6 + 30 + 37 + 4
    assert check_sequence(CHAIN, dataclasses.replace(LIMITS, heap_bytes=4 * words)) == []
    (found,) = check_sequence(CHAIN, dataclasses.replace(LIMITS, heap_bytes=4 * words - 1))
    assert str(found) == f"[sequence] instructions: need {4 * words} bytes, have {4 * words - 1} bytes (the heap)"
