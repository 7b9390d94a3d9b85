# SPDX-License-Identifier: Apache-2.0
"""Helpers of the tests of the checker: a plan without faults, changes to it, and the messages of a check."""

import dataclasses

from flownpu.aie.check import check
from flownpu.aie.iron.compat import NPU2, ObjectFifo, Program, Runtime, Tile, Worker
from flownpu.aie.plan.data import Dimension, HostBuffer, Tap, TileBuffer, Transfer, Type
from flownpu.aie.plan.data import Tile as Place
from tests.aie.small_programs import chain, tensor, with_array, with_end, with_fifo, with_steps

CHAIN = chain()

CORE = CHAIN.array.cores[0]


def messages(plan, limits=None):
    return [str(violation) for violation in check(plan, limits)]


def moved(plan, name, port, column, row):
    return with_end(plan, name, port, tile=Place(column, row))


BUFFER = TileBuffer("extra", Place(0, 2), Type((4,), "i32"))


def walked(walk, port="produce", name="b", dtype="i32", elements=64, **changes):
    """The chain with a walk at one end of a fifo; b's producer is the memory tile, c's the core."""
    plan = CHAIN
    for fifo in ("a", "b", "c"):
        plan = with_fifo(plan, fifo, type=Type((elements,), dtype))
    kind = Type((elements,), dtype)
    plan = with_array(
        plan, kernels=(dataclasses.replace(plan.array.kernels[0], arguments=(kind, kind, Type((), "i32"))),)
    )
    host = tuple(HostBuffer(name, Type((4 * elements,), dtype)) for name in ("source", "target"))
    plan = dataclasses.replace(plan, sequence=dataclasses.replace(plan.sequence, buffers=host))
    for step in ("a", "c"):
        tap = Tap(0, (Dimension(4 * elements, 1),))
        steps = [dataclasses.replace(s, tap=tap) if getattr(s, "fifo", "") == step else s for s in plan.sequence.steps]
        plan = with_steps(plan, *steps)
    plan = with_end(plan, name, port, walk=tuple(Dimension(*d) for d in walk))
    return with_fifo(plan, name, **changes) if changes else plan


STEPS = CHAIN.sequence.steps

FILL, DRAIN = (step for step in STEPS if isinstance(step, Transfer))


def tasks(count, *, awaited=False, step=1):
    """A plan with `count` pairs of a fill and a drain; if `awaited`, at most `step` pairs are under way at once."""
    kind = tensor(64)
    a, c = ObjectFifo(kind, name="a"), ObjectFifo(kind, name="c")

    def core(a, c):
        a.acquire(1), c.acquire(1)
        a.release(1)
        c.release(1)

    def sequence(x, z, a, c):
        pairs = []
        for _ in range(count):
            pairs.append((a.fill(x, managed=False), c.drain(z, wait=True, managed=False)))
            if awaited and len(pairs) == step:
                fill, drain = pairs.pop(0)
                drain.await_()
                fill.free()
        for _, drain in pairs:
            drain.await_()
        for fill, _ in pairs:
            fill.free()

    runtime = Runtime(sequence, [kind, kind, a.prod(tile=Tile(0, 0)), c.cons(tile=Tile(0, 0))])
    return Program(NPU2(), runtime, [Worker(core, [a.cons(), c.prod()])]).resolve_program()
