# SPDX-License-Identifier: Apache-2.0
"""Small programs and changes to plans, for the tests of the recorder, the checker, the emulator and the printer."""

import dataclasses

import numpy as np

from flownpu.aie.iron.compat import (
    NPU2,
    Buffer,
    Kernel,
    ObjectFifo,
    Program,
    Runtime,
    Tile,
    Worker,
    WorkerRuntimeBarrier,
    range_,
)
from flownpu.aie.plan.data import Array, Plan, Sequence


def tensor(*shape, dtype=np.int32):
    return np.ndarray[shape, np.dtype[dtype]]


def indices(walk, offset=0):
    """The flat element index of every step of a walk, in order: int64, one dimension."""
    places = np.full((), offset, np.int64)
    for dimension in walk:
        places = places[..., None] + np.arange(dimension.size, dtype=np.int64) * dimension.stride
    return places.reshape(-1)


KIND = tensor(64)


def one_core(core, *arguments, sequence=None, types=(), kind=None):
    """The plan of one core between two fifos."""
    kind = kind or tensor(64)
    a, c = ObjectFifo(kind, name="a"), ObjectFifo(kind, name="c")

    def default(x, z, a, c):
        a.fill(x)
        c.drain(z, wait=True)

    ends = [a.prod(), c.cons()]
    runtime = Runtime(sequence or default, [kind, kind, *ends, *types])
    return Program(NPU2(), runtime, [Worker(core, [a.cons(), c.prod(), *arguments])]).resolve_program()


def idle(a, c):
    a.acquire(1)
    c.acquire(1)
    a.release(1)
    c.release(1)


def chain(passes: int = 4, elements: int = 64) -> Plan:
    """host -> a -> memory tile -> b -> core (0, 2) -> c -> host; `passes` objects, by a run-time parameter."""
    kind, host = tensor(elements), tensor(passes * elements)
    a, c = ObjectFifo(kind, name="a"), ObjectFifo(kind, name="c")
    b = a.cons().forward(tile=Tile(0, 1), name="b")
    scale = Kernel("scale", "scale.cc", [kind, kind, np.int32])
    parameters = Buffer(tensor(16), name="parameters", use_write_rtp=True)
    barrier = WorkerRuntimeBarrier()

    def core(b, c, scale, parameters, barrier):
        barrier.wait_for_value(1)
        count = parameters[0]
        barrier.release_with_value(1)
        for _ in range_(count):
            x, y = b.acquire(1), c.acquire(1)
            scale(x, y, 3)
            b.release(1)
            c.release(1)

    def sequence(source, target, a, c, parameters, barrier):
        parameters[0] = passes
        barrier.set(1)
        a.fill(source)
        c.drain(target, wait=True)

    worker = Worker(
        core, [b.cons(), c.prod(), scale, parameters, barrier], tile=Tile(0, 2), dynamic_objfifo_lowering=True
    )
    ends = [a.prod(tile=Tile(0, 0)), c.cons(tile=Tile(0, 0)), parameters, barrier]
    return Program(NPU2(), Runtime(sequence, [host, host, *ends]), [worker]).resolve_program("chain")


def between(workers, a, c, *host) -> Plan:
    """The plan of workers between two fifos: `a` is filled from x, `c` drained to z, by a transfer each.

    `host`: the types of x and z.
    """

    def sequence(x, z, a, c):
        a.fill(x)
        c.drain(z, wait=True)

    ends = a.prod(tile=Tile(0, 0)), c.cons(tile=Tile(0, 0))
    return Program(NPU2(), Runtime(sequence, [*host, *ends]), workers).resolve_program()


def split_and_join(parts: int) -> Plan:
    """host -> a, split to `parts` cores -> joined in c -> host; core i adds i."""
    kind, part = tensor(64), tensor(64 // parts)
    offsets = [place * 64 // parts for place in range(parts)]
    a, c = ObjectFifo(kind, name="a"), ObjectFifo(kind, name="c")
    ins = a.cons().split(offsets, Tile(0, 1), obj_types=[part] * parts)
    outs = c.prod().join(offsets, Tile(0, 1), obj_types=[part] * parts)
    add = Kernel("add", "add.cc", [part, part, np.int32])

    def core(x, y, add, number):
        add(x.acquire(1), y.acquire(1), number)
        x.release(1)
        y.release(1)

    workers = [
        Worker(core, [x.cons(), y.prod(), add, number], tile=Tile(0, 2 + number))
        for number, (x, y) in enumerate(zip(ins, outs, strict=True))
    ]
    return between(workers, a, c, tensor(12 * 64), tensor(12 * 64))


def with_array(plan: Plan, **changes) -> Plan:
    """The plan with other parts in its array."""
    array: Array = dataclasses.replace(plan.array, **changes)
    return dataclasses.replace(plan, array=array)


def with_steps(plan: Plan, *steps) -> Plan:
    """The plan with other steps."""
    sequence: Sequence = dataclasses.replace(plan.sequence, steps=tuple(steps))
    return dataclasses.replace(plan, sequence=sequence)


def with_fifo(plan: Plan, fifo_name: str, /, **changes) -> Plan:
    """The plan with one fifo changed."""
    fifos = [dataclasses.replace(f, **changes) if f.name == fifo_name else f for f in plan.array.fifos]
    return with_array(plan, fifos=tuple(fifos))


def with_end(plan: Plan, name: str, port: str, **changes) -> Plan:
    """The plan with one end of a fifo changed; `port`: "produce", or "consume" for the first consumer."""
    fifo = next(fifo for fifo in plan.array.fifos if fifo.name == name)
    if port == "produce":
        return with_fifo(plan, name, producer=dataclasses.replace(fifo.producer, **changes))
    return with_fifo(plan, name, consumers=(dataclasses.replace(fifo.consumers[0], **changes), *fifo.consumers[1:]))


def with_body(plan: Plan, change) -> Plan:
    """The plan with the body of the first loop of its first core changed by `change(tuple) -> tuple`."""
    core = plan.array.cores[0]
    place = next(i for i, statement in enumerate(core.body) if hasattr(statement, "body"))
    loop = dataclasses.replace(core.body[place], body=tuple(change(core.body[place].body)))
    core = dataclasses.replace(core, body=(*core.body[:place], loop, *core.body[place + 1 :]))
    return with_array(plan, cores=(core, *plan.array.cores[1:]))


def with_step(plan: Plan, kind: type, /, **changes) -> Plan:
    """The plan with the first step of a kind changed."""
    place = next(i for i, step in enumerate(plan.sequence.steps) if isinstance(step, kind))
    steps = list(plan.sequence.steps)
    steps[place] = dataclasses.replace(steps[place], **changes)
    return with_steps(plan, *steps)
