# SPDX-License-Identifier: Apache-2.0
"""Planted deadlocks: the message says who waits for whom, by the plan's names."""

import dataclasses

import numpy as np
import pytest

from flownpu import _native
from flownpu.aie.iron.compat import Kernel, ObjectFifo, Tile, Worker
from flownpu.aie.plan.data import Release, SetBarrier, Transfer, WriteParameter
from tests.aie.emulation import emulate
from tests.aie.small_programs import between, chain, tensor, with_body, with_step, with_steps


def deadlock(plan, *, seed=0, functions=None, **inputs):
    """The message of the deadlock that a plan must end in."""
    functions = {"scale": lambda *_: None} if functions is None else functions
    inputs = inputs or {"source": np.zeros(plan.sequence.buffers[0].type.elements, np.int32)}
    with pytest.raises(_native.Deadlock) as caught:
        emulate(plan, functions=functions, checked=False, seed=seed, **inputs)
    return str(caught.value)


def without_release(port):
    return with_body(chain(), lambda body: [s for s in body if not (isinstance(s, Release) and s.port == port)])


@pytest.mark.parametrize("seed", range(5))
def test_unreleased_output_deadlock_names_path(seed):
    """The message follows the whole way from the sequence to the core's DMA, which waits for an object that never
    comes.
    """
    assert deadlock(without_release("produce"), seed=seed) == (
        "[emulator] deadlock: nothing can go on; what is waited for is given by nobody:\n"
        "  sequence sequence, step 4 of 6 (await c_task1)\n"
        "    waits for the token of c_task1, which is to come from input channel 0 of shim tile (0, 0) (fifo c)\n"
        "  input channel 0 of shim tile (0, 0) (fifo c)\n"
        "    waits for data for transfer c_task1, 1024 bytes more, "
        "which is to come from output channel 0 of compute tile (0, 2) (fifo c)\n"
        "  output channel 0 of compute tile (0, 2) (fifo c)\n"
        "    waits for full ones of c at (0, 2) (0 there), which nobody gives"
    )


def test_unreleased_input_is_still_held_after_call():
    """No deadlock: as in hardware, an acquire counts objects that the core already holds. It still holds one
    afterwards.
    """
    plan = without_release("consume")
    with pytest.raises(AssertionError, match=r"core \(0, 2\) still holds 1 objects of the consume end of fifo b"):
        emulate(plan, functions={"scale": lambda *_: None}, checked=False, source=np.zeros(256, np.int32))


def test_circle_of_cores_deadlock_is_reported():
    """Each core waits for the other's object before it releases its own."""
    kind = tensor(16)
    a, c = ObjectFifo(kind, name="a"), ObjectFifo(kind, name="c")
    there, back = ObjectFifo(kind, name="there"), ObjectFifo(kind, name="back")
    add = Kernel("add", "add.cc", [kind, kind, kind])

    def first(x, given, y, add):
        add(x.acquire(1), given.acquire(1), y.acquire(1))
        for fifo in (x, given, y):
            fifo.release(1)

    def second(given, y, back, add):
        source = given.acquire(1)
        add(source, source, y.acquire(1))
        y.release(1)
        add(source, source, back.acquire(1))
        back.release(1)
        given.release(1)

    workers = [
        Worker(first, [a.cons(), back.cons(), there.prod(), add], tile=Tile(0, 2)),
        Worker(second, [there.cons(), c.prod(), back.prod(), add], tile=Tile(2, 2)),
    ]
    message = deadlock(between(workers, a, c, kind, kind), functions={"add": lambda *_: None}, x=np.zeros(16, np.int32))
    path, circle = message.split("\n and these wait for each other in a circle:")
    assert "await c_task1" in path
    assert [line.strip() for line in circle.splitlines() if line.startswith("  ") and line[2] != " "] == [
        "core (2, 2)",
        "input channel 0 of compute tile (2, 2) (fifo there)",
        "output channel 0 of compute tile (0, 2) (fifo there)",
        "core (0, 2)",
        "input channel 1 of compute tile (0, 2) (fifo back)",
        "output channel 0 of compute tile (2, 2) (fifo back)",
    ]


def test_broadcast_not_taken_by_one_core_deadlocks():
    kind, host = tensor(16), tensor(64)
    a, c, d = (ObjectFifo(kind, name=name) for name in "acd")
    copy = Kernel("copy", "copy.cc", [kind, kind])

    def takes(x, y, copy):
        copy(x.acquire(1), y.acquire(1))
        x.release(1)
        y.release(1)

    def waits(x, given, copy):
        held = given.acquire(1)
        copy(x.acquire(1), held)
        x.release(1)
        given.release(1)

    workers = [
        Worker(takes, [a.cons(), c.prod(), copy], tile=Tile(0, 2)),
        Worker(waits, [a.cons(), d.cons(), copy], tile=Tile(5, 3)),
    ]
    plan = between([*workers, Worker(idle, [d.prod()], tile=Tile(2, 2))], a, c, host, host)
    message = deadlock(plan, functions={"copy": lambda *_: None}, x=np.zeros(64, np.int32))
    assert "input channel 0 of compute tile (5, 3) (fifo a)\n    waits for free objects of a at (5, 3)" in message
    assert message.endswith(
        "output channel 0 of compute tile (2, 2) (fifo d)\n"
        "    waits for full ones of d at (2, 2) (0 there), which nobody gives"
    )


def idle(fifo):
    """A core program that does nothing with its fifo."""


def test_unstarted_core_deadlock_names_barrier():
    steps = [step for step in chain().sequence.steps if not isinstance(step, SetBarrier)]
    message = deadlock(with_steps(chain(), *steps))
    assert "  core (0, 2)\n    waits for barrier0_0_2 to be 1 (it is 0), which is to come from core (0, 2)" in message


def test_short_fill_deadlock_names_circle():
    """The core waits for one object more than the sequence sends: the circle goes through the sequence."""
    plan = with_step(chain(), Transfer, tap=chain(3).sequence.steps[2].tap)  # three objects of four
    message = deadlock(plan)
    assert "in a circle" in message
    assert message.endswith(
        "  input channel 0 of memory tile (0, 1) (fifo a)\n"
        "    waits for data, 256 bytes more, which is to come from output channel 0 of shim tile (0, 0) (fifo a)\n"
        "  output channel 0 of shim tile (0, 0) (fifo a)\n"
        "    waits for a task, which is to come from sequence sequence, step 4 of 6 (await c_task1)"
    )


def test_full_queue_deadlock_names_step():
    """The first fill fits the fifos. The next one is stuck, and three more after it fill the channel's queue."""
    plan = chain()
    start = [s for s in plan.sequence.steps if isinstance(s, WriteParameter)]
    fill = next(s for s in plan.sequence.steps if isinstance(s, Transfer))
    fills = [dataclasses.replace(fill, name=f"fill_{number}") for number in range(6)]
    message = deadlock(with_steps(plan, *start, *fills))
    assert (
        "sequence sequence, step 6 of 7 (start fill_5)\n    waits for a place in the queue, which is to come from "
        in message
    )
