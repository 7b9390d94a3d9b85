# SPDX-License-Identifier: Apache-2.0
"""Faults of flow: fifos that are not drained, not reached, or out of balance.

Each rule is broken once; the message names the place, the need and the finding.
"""

import dataclasses

import pytest

from flownpu.aie.iron.access_pattern import TensorAccessPattern
from flownpu.aie.iron.compat import NPU1, NPU2, ObjectFifo, Program, Runtime, Tile, Worker, range_
from flownpu.aie.plan.data import (
    Acquire,
    Await,
    Core,
    Dimension,
    Fifo,
    Release,
    SetBarrier,
    Tap,
    Transfer,
    Type,
    WriteParameter,
)
from flownpu.aie.plan.data import Tile as Place
from tests.aie.check.faults import CHAIN, FILL, STEPS, messages, tasks
from tests.aie.small_programs import tensor, with_array, with_end, with_step, with_steps


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (
            with_step(CHAIN, WriteParameter, value=5),
            "[link a -> b] elements in a call: need [256] in, have [320] out (as seen by each of its fifos)",
        ),
        (
            with_step(CHAIN, WriteParameter, index=1),
            "run-time parameters written before the core starts: need ('parameters', 0), have not written",
        ),
        (
            with_steps(CHAIN, *[s for s in STEPS if not isinstance(s, SetBarrier)]),
            "need 256, have 0 (no step sets barrier0_0_2 to 1: the core never starts)",
        ),
        (
            with_steps(CHAIN, *[s for s in STEPS if isinstance(s, SetBarrier)], *STEPS),
            "run-time parameters written before the core starts",
        ),
        (
            with_step(CHAIN, Transfer, tap=Tap(0, (Dimension(128, 1),))),
            "[link a -> b] elements in a call: need [128] in, have [256] out",
        ),
    ],
)
def test_faulty_flow_is_refused(plan, message):
    assert any(message in text for text in messages(plan)), messages(plan)


def test_undrained_fifo_is_refused():
    # Without the drain nothing shows that the fill is complete, so the fill itself is awaited.
    fill = dataclasses.replace(FILL, token=True)
    plan = with_steps(CHAIN, *STEPS[:2], fill, Await(fill.name))
    message = "[fifo c] elements that its consumer at shim tile (0, 0) takes in a call: need 0, have 256"
    assert any(message in text for text in messages(plan))


def test_core_without_barrier_needs_whole_passes_of_all_fifos():
    """The host sends objects of a for two passes of the loop, and of the other fifo for three."""
    kind = tensor(64)
    a, b, c = (ObjectFifo(kind, name=name) for name in "abc")

    def core(a, b, c):
        for _ in range_(2):
            a.acquire(1), b.acquire(1)
            a.release(1)
            b.release(1)
        c.acquire(1)
        c.release(1)

    def sequence(x, y, z, a, b, c):
        a.fill(x)
        b.fill(y)
        c.drain(z, wait=True)

    def plan(first, second, device=None):
        fifos = [a.cons(), b.cons(), c.prod()]
        runtime = Runtime(sequence, [tensor(first), tensor(second), kind, a.prod(), b.prod(), c.cons()])
        return Program(device or NPU1(), runtime, [Worker(core, fifos)]).resolve_program()

    assert messages(plan(128, 192)) == [
        "[fifo b] elements that its consumer at compute tile (0, 2) takes in a call: need 128, have 192"
        " (have: what its producer sends)"
    ]


def test_half_pass_of_core_is_refused():
    plan = tasks(1)
    body = plan.array.cores[0].body
    plan = with_array(plan, cores=(Core(Place(0, 2), (*body, *body)),))
    assert any("passes of the core for fifo a (consume): need a whole number, have 0.5" in t for t in messages(plan))


def test_unreachable_fifo_is_refused():
    """A fifo between cores that nothing from the host feeds."""
    kind = Type((64,), "i32")
    core = Core(Place(3, 3), (Acquire("v", "loop", "produce", 1), Release("loop", "produce", 1)))
    sink = Core(Place(5, 5), (Acquire("v", "loop", "consume", 1), Release("loop", "consume", 1)))
    end = CHAIN.array.fifos[0].producer
    fifo = Fifo("loop", kind, dataclasses.replace(end, tile=core.tile), (dataclasses.replace(end, tile=sink.tile),))
    plan = with_array(CHAIN, fifos=(*CHAIN.array.fifos, fifo), cores=(*CHAIN.array.cores, core, sink))
    assert messages(plan) == [
        "[fifo loop] data in a call: need some, have none (nothing that the sequence moves reaches it)"
    ]


def test_walk_of_joined_output_covers_each_part():
    """dimensionsToStream of a join's output applies to every input's part (as a real aie-opt has it)."""
    kind, part = tensor(128), tensor(64)
    c = ObjectFifo(kind, name="c", to_stream=TensorAccessPattern([8, 8], 0, [8, 8], [1, 8]))
    parts = c.prod().join([0, 64], tile=Tile(0, 1), obj_types=[part] * 2)
    a = ObjectFifo(part, name="a")

    def core(a, c):
        a.acquire(1), c.acquire(1)
        a.release(1)
        c.release(1)

    def sequence(x, z, a, c):
        a.fill(x)
        c.drain(z, wait=True)

    workers = [Worker(core, [a.cons(), p.prod()], tile=Tile(0, 2 + row)) for row, p in enumerate(parts)]
    plan = Program(NPU2(), Runtime(sequence, [part, kind, a.prod(), c.cons()]), workers).resolve_program()
    assert messages(plan) == []
    whole = with_end(plan, "c", "produce", walk=(Dimension(128, 1),))
    assert any("elements of the walk: need 128, have 64" in text for text in messages(whole))
