# SPDX-License-Identifier: Apache-2.0
"""Every limit, broken once: the message names the place, the resource, what is needed and what is there.

The start is a plan without faults (`programs.chain`: host -> a -> memory tile -> b -> core (0, 2) -> c -> host) or a
small program of its own.
"""

import dataclasses

import numpy as np
import pytest

from flownpu.aie.access_pattern import TensorAccessPattern
from flownpu.aie.checker import PlanError, check, require_valid
from flownpu.aie.iron_compat import NPU1, NPU2, Buffer, Kernel, ObjectFifo, Program, Runtime, Tile, Worker, range_
from flownpu.aie.npu_limits import NPU2 as LIMITS
from flownpu.aie.npu_limits import with_limits
from flownpu.aie.plan import (
    Acquire,
    Await,
    Barrier,
    BarrierWait,
    BufferArgument,
    Call,
    Core,
    Dimension,
    Element,
    Fifo,
    Free,
    HostBuffer,
    Link,
    Load,
    Release,
    SetBarrier,
    Tap,
    Transfer,
    Type,
    WriteParameter,
)
from flownpu.aie.plan import Buffer as PlanBuffer
from flownpu.aie.plan import Tile as Place
from tests.aie.programs import chain, tensor, with_array, with_body, with_end, with_fifo, with_step, with_steps

CHAIN = chain()
CORE = CHAIN.array.cores[0]


def messages(plan, limits=None):
    return [str(violation) for violation in check(plan, limits)]


def test_a_good_plan_passes():
    assert messages(CHAIN) == []
    assert require_valid(CHAIN) is CHAIN


def test_all_violations_of_a_kind_are_in_the_error():
    plan = with_end(with_fifo(CHAIN, "a", type=Type((1 << 18,), "i32")), "c", "produce", walk=(Dimension(600, 1),))
    with pytest.raises(PlanError, match=r"\[plan chain\] breaks the hardware's limits:\n") as raised:
        require_valid(plan)
    assert len(raised.value.violations) > 1


# --- Structure ------------------------------------------------------------------------------------------------------


def moved(plan, name, port, column, row):
    return with_end(plan, name, port, tile=Place(column, row))


BUFFER = PlanBuffer("extra", Place(0, 2), Type((4,), "i32"))
A = next(fifo for fifo in CHAIN.array.fifos if fifo.name == "a")
LINK = CHAIN.array.links[0]
STRUCTURE = {
    "no such column": (
        moved(CHAIN, "a", "produce", 8, 0),
        "[fifo a] place: need tile (8, 0), have no such tile (npu2 has columns 0..7 and rows 0..5)",
    ),
    "core on a memory tile": (
        with_array(CHAIN, cores=(dataclasses.replace(CORE, tile=Place(1, 1)), CORE)),
        "[memory tile (1, 1)] a core: need 1, have 0",
    ),
    "two cores on a tile": (with_array(CHAIN, cores=(CORE, CORE)), "[compute tile (0, 2)] cores: need 2, have 1"),
    "buffer on a shim tile": (
        with_array(CHAIN, buffers=(*CHAIN.array.buffers, dataclasses.replace(BUFFER, tile=Place(3, 0)))),
        "[shim tile (3, 0)] memory of buffer extra: need 16, have 0",
    ),
    "barrier without a core": (
        with_array(CHAIN, barriers=(*CHAIN.array.barriers, Barrier("gate", Place(4, 4)))),
        "[compute tile (4, 4)] a core that waits on gate: need 1, have 0",
    ),
    "a name twice": (with_fifo(CHAIN, "a", name="c"), "[plan] the name c: need 2 things, have 1 thing"),
    "no symbol": (with_fifo(CHAIN, "a", name="a b"), "[plan] a name: need letters, digits and _, have 'a b'"),
    "no core at a compute tile": (
        moved(CHAIN, "c", "produce", 5, 5),
        "[fifo c] a user of its produce end at compute tile (5, 5): need a core, have none",
    ),
    "no link at a memory tile": (
        with_array(CHAIN, links=()),
        "[fifo a] a user of its consume end at memory tile (0, 1): need a link, have none",
    ),
    "depth 0": (with_end(CHAIN, "c", "produce", depth=0), "depth at compute tile (0, 2): need 1 or more, have 0"),
    "two ends on a tile": (
        with_fifo(CHAIN, "b", consumers=CHAIN.array.fifos[0].consumers * 2),
        "[fifo b] consumers on compute tile (0, 2): need 2, have 1",
    ),
    "repeats from the shim": (
        with_fifo(CHAIN, "a", repeat_count=2),
        "[fifo a] repeat_count: need 2, have 1 (a shim tile repeats by its tap, not by its fifo)",
    ),
    "repeat 0": (with_fifo(CHAIN, "b", repeat_count=0), "[fifo b] repeat_count: need 1 or more, have 0"),
    "padding by a core": (
        with_fifo(CHAIN, "c", padding=((0, 4),)),
        "[fifo c] padding: need a memory tile as producer, have compute",
    ),
    "odd object": (
        with_fifo(CHAIN, "a", type=Type((3,), "bf16")),
        "[fifo a] object size: need a multiple of 4 bytes, have 6 bytes",
    ),
    "delegate out of reach": (
        with_fifo(CHAIN, "c", delegate=Place(3, 3)),
        "[fifo c] reach of compute tile (0, 2) into the memory of tile (3, 3): need own, north, south or west",
    ),
    "links in a chain": (
        with_array(CHAIN, links=(LINK, Link(("b",), ("c",)))),
        "[fifo b] links: need 2, have 1 (a fifo cannot be in more than one link",
    ),
    "two links of an input": (
        with_array(CHAIN, links=(LINK, LINK)),
        "[fifo a] links that have it as input: need 2, have 1",
    ),
    "link of nothing": (
        with_array(CHAIN, links=(LINK, Link(("x",), ("y",)))),
        "[link x -> y] fifos: need names of fifos on both sides, have ['x', 'y']",
    ),
    "no link point": (
        moved(CHAIN, "b", "produce", 1, 1),
        "[link a -> b] tiles where its fifos meet: need 1, have 2: (0, 1), (1, 1)",
    ),
    "forward of other types": (
        with_fifo(CHAIN, "b", type=Type((64,), "u32")),
        "[link a -> b] element type: need 64xi32, have 64xu32",
    ),
    "no consumers": (with_fifo(CHAIN, "c", consumers=()), "[fifo c] consumers: need 1 or more, have 0"),
    "link of a broadcast": (
        with_fifo(CHAIN, "a", consumers=(A.consumers[0], dataclasses.replace(A.consumers[0], tile=Place(1, 1)))),
        "[link a -> b] consumers of each input: need 1, have [2] (a broadcast cannot be linked on)",
    ),
    "link of many to many": (
        with_array(CHAIN, links=(Link(("a", "b"), ("b", "c")),)),
        "[link a, b -> b, c] shape: need 1 to 1, 1 to many or many to 1, have 2 to 2",
    ),
    "link on a shim tile": (
        moved(moved(CHAIN, "a", "consume", 0, 0), "b", "produce", 0, 0),
        "[link a -> b] memory to link in: need a compute or memory tile, have shim tile (0, 0)",
    ),
    "forward with offsets": (
        with_array(CHAIN, links=(dataclasses.replace(LINK, offsets=(0,)),)),
        "[link a -> b] offsets: need none for a forward, have (0,)",
    ),
    "a host buffer twice": (
        dataclasses.replace(
            CHAIN, sequence=dataclasses.replace(CHAIN.sequence, buffers=(CHAIN.sequence.buffers[0],) * 2)
        ),
        "[sequence] the host buffer source: need 2 buffers, have 1 buffer",
    ),
    "forward of odd sizes": (
        with_fifo(CHAIN, "b", type=Type((40,), "i32")),
        "[link a -> b] object sizes: need one a multiple of the other, have 64xi32 and 40xi32",
    ),
}


@pytest.mark.parametrize("case", STRUCTURE)
def test_structure(case):
    plan, message = STRUCTURE[case]
    assert any(message in text for text in messages(plan)), messages(plan)


def split_plan(offsets, part, elements=100):
    """One stream to two cores over a memory tile, parts of `part` elements."""
    kind, piece = tensor(elements), tensor(part)
    a = ObjectFifo(kind, name="a")
    pieces = a.cons().split(offsets, tile=Tile(0, 1), obj_types=[piece] * len(offsets))
    outs = [ObjectFifo(piece, name=f"c{row}") for row in range(len(offsets))]
    copy = Kernel("copy", "copy.cc", [piece, piece])

    def core(x, y, copy):
        copy(x.acquire(1), y.acquire(1))
        x.release(1)
        y.release(1)

    def sequence(x, z, a, *outs):
        a.fill(x)
        for out in outs:
            out.drain(z, wait=True)

    workers = [
        Worker(core, [x.cons(), y.prod(), copy], tile=Tile(0, 2 + row))
        for row, (x, y) in enumerate(zip(pieces, outs, strict=True))
    ]
    runtime = Runtime(sequence, [kind, piece, a.prod(), *[out.cons() for out in outs]])
    return Program(NPU2(), runtime, workers).resolve_program()


@pytest.mark.parametrize(
    ("offsets", "part", "message"),
    [
        # aie-opt takes 100 elements in parts of 64 at 0 and 64 without a word, and moves what is not there.
        ([0, 64], 64, "coverage of a by a_split1: need objects that fill elements 64..99 exactly, have objects of 64"),
        ([0, 40], 40, "coverage of a by a_split1: need objects that fill elements 40..99 exactly, have objects of 40"),
        ([4, 52], 48, "offsets: need ascending from 0, below 100, have [4, 52]"),
        ([0, 0], 50, "offsets: need ascending from 0, below 100, have [0, 0]"),
        ([0, 100], 100, "offsets: need ascending from 0, below 100, have [0, 100]"),
    ],
)
def test_parts_tile_the_object(offsets, part, message):
    assert any(message in text for text in messages(split_plan(offsets, part)))


def test_a_split_that_covers_its_object():
    assert messages(split_plan([0, 52], 52, 104)) == []


def test_a_part_of_another_type():
    plan = with_fifo(split_plan([0, 52], 52, 104), "a_split1", type=Type((52,), "u32"))
    assert "[link a -> a_split0, a_split1] element type of a_split1: need i32, have u32" in messages(plan)


def test_a_split_without_offsets():
    plan = split_plan([0, 52], 52, 104)
    plan = with_array(plan, links=(dataclasses.replace(plan.array.links[0], offsets=(0,)),))
    assert messages(plan) == ["[link a -> a_split0, a_split1] offsets: need 2, one a part, have 1"]


# --- Resources ------------------------------------------------------------------------------------------------------


def many(count, outputs=0, *, elements=64, depth=2, tile=(0, 2), buffers=()):
    """`count` fifos into one core and `outputs` out of it, from and to shim tiles all over the array."""
    kind = tensor(elements)
    ins = [ObjectFifo(kind, name=f"a{i}", depth=depth) for i in range(count)]
    outs = [ObjectFifo(kind, name=f"c{i}", depth=depth) for i in range(outputs)]

    def core(*fifos):
        for fifo in fifos[: count + outputs]:
            fifo.acquire(1)
        for fifo in fifos[: count + outputs]:
            fifo.release(1)

    def sequence(x, z, *fifos):
        for fifo in fifos[:count]:
            fifo.fill(x)
        for fifo in fifos[count:]:
            fifo.drain(z, wait=True)

    worker = Worker(core, [*[a.cons() for a in ins], *[c.prod() for c in outs], *buffers], tile=Tile(*tile))
    ends = [a.prod(tile=Tile(i // 2, 0)) for i, a in enumerate(ins)] + [
        c.cons(tile=Tile(i // 2, 0)) for i, c in enumerate(outs)
    ]
    return Program(NPU2(), Runtime(sequence, [kind, kind, *ends]), [worker]).resolve_program()


def pass_through(count, *, elements=64, depth=2, column=0):
    """`count` streams through one memory tile, each to a core of its own."""
    kind = tensor(elements)
    ins = [ObjectFifo(kind, name=f"a{i}", depth=depth) for i in range(count)]
    mids = [a.cons().forward(tile=Tile(column, 1), depth=depth) for a in ins]
    outs = [ObjectFifo(kind, name=f"c{i}") for i in range(count)]

    def core(x, y):
        x.acquire(1), y.acquire(1)
        x.release(1)
        y.release(1)

    def sequence(x, z, *ends):
        for end in ends[:count]:
            end.fill(x)
        for end in ends[count:]:
            end.drain(z, wait=True)

    workers = [
        Worker(core, [mid.cons(depth=1), out.prod(depth=1)], tile=Tile(i % 8, 2 + i // 8))
        for i, (mid, out) in enumerate(zip(mids, outs, strict=True))
    ]
    ends = [a.prod(tile=Tile(i // 2, 0)) for i, a in enumerate(ins)] + [
        c.cons(tile=Tile(i // 2, 0)) for i, c in enumerate(outs)
    ]
    return Program(NPU2(), Runtime(sequence, [kind, kind, *ends]), workers).resolve_program()


def test_core_memory_is_exact():
    """64512 bytes beside a stack of 1024 fit, four more do not (both asked of a real aie-opt)."""
    fit, over = (many(1, 1, elements=n // 4, depth=1) for n in (32256, 32260))
    assert messages(fit) == []
    assert messages(over) == [
        "[compute tile (0, 2)] memory: need 65544 bytes, have 65536 bytes (c0 1 x 32260 + a0 1 x 32260 + stack 1024)"
    ]


def test_memory_tile_is_exact():
    """524288 bytes fit, four more do not; the real compiler would move the rest to the next column without a word."""
    fit, over = (
        with_end(pass_through(1, elements=n // 4), "a0", "consume", depth=d) for n, d in ((16384, 32), (16388, 32))
    )
    assert not any("memory:" in text for text in messages(fit))
    assert "[memory tile (0, 1)] memory: need 524416 bytes, have 524288 bytes (a0 32 x 16388)" in messages(over)


def test_counters_of_objects_count():
    """A core that counts its objects at run time has a word for each fifo; a real aie-opt allocates the same."""
    plan = many(1, 1, elements=8064, depth=1)
    core = plan.array.cores[0]
    assert messages(plan) == []
    (message,) = messages(with_array(plan, cores=(dataclasses.replace(core, dynamic=True),)))
    assert message.startswith("[compute tile (0, 2)] memory: need 65544 bytes, have 65536 bytes")
    assert "object counters 8" in message


def test_stack_and_buffers_count():
    plan = many(1, 1, buffers=[Buffer(tensor(16000), name="scratch")])
    assert messages(plan) == [
        "[compute tile (0, 2)] memory: need 66048 bytes, have 65536 bytes"
        " (scratch 64000 + stack 1024 + c0 2 x 256 + a0 2 x 256)"
    ]


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (many(3), "[compute tile (0, 2)] input DMA channels: need 3, have 2 (a0, a1, a2)"),
        (many(1, 3), "[compute tile (0, 2)] output DMA channels: need 3, have 2 (c0, c1, c2)"),
        (pass_through(7), "[memory tile (0, 1)] input DMA channels: need 7, have 6"),
        (pass_through(7), "[memory tile (0, 1)] output DMA channels: need 7, have 6"),
        (
            moved(moved(pass_through(3), "a2", "produce", 0, 0), "c2", "consume", 0, 0),
            "[shim tile (0, 0)] output DMA channels: need 3, have 2 (a0, a1, a2)",
        ),
        (many(1, 1, depth=9, elements=8), "[compute tile (0, 2)] buffer descriptors: need 18, have 16"),
        (
            # Channel 0 in and channel 0 out are both even.
            pass_through(1, depth=13),
            "[memory tile (0, 1)] buffer descriptors of even channels: need 26, have 24",
        ),
        (
            pass_through(5, depth=5),
            "[memory tile (0, 1)] buffer descriptors: need 50, have 48",
        ),
    ],
)
def test_channels_and_descriptors(plan, message):
    assert any(text.startswith(message) for text in messages(plan)), messages(plan)


def test_locks():
    buffers, names = CHAIN.array.buffers, [Barrier(f"gate{i}", Place(0, 2)) for i in range(12)]
    plan = with_array(CHAIN, barriers=(*CHAIN.array.barriers, *names), buffers=buffers)
    # b and c have a pair each, and there is the chain's own barrier.
    assert "[compute tile (0, 2)] locks: need 17, have 16" in messages(plan)


def test_lock_values():
    plan = with_array(CHAIN, barriers=(dataclasses.replace(CHAIN.array.barriers[0], initial_value=64),))
    assert "[compute tile (0, 2)] initial value of barrier0_0_2: need 64, have 0..63" in messages(plan)
    plan = with_fifo(CHAIN, "b", repeat_count=32)
    message = "[memory tile (0, 1)] lock value of fifo a: need 64, have 63 (objects x repeats)"
    assert message in messages(plan)


def test_memory_within_reach():
    near, far = (PlanBuffer("state", Place(*tile), Type((64,), "i32")) for tile in ((0, 3), (1, 2)))
    for buffer, expected in (
        (near, []),
        (
            far,
            [
                "[compute tile (0, 2)] buffer state in the memory of tile (1, 2): "
                "need own, north, south or west, have out of reach"
            ],
        ),
    ):
        call = Call("scale", (Element("view1", 0), BufferArgument("state"), 3))
        plan = with_body(CHAIN, lambda body, call=call: [call if isinstance(s, Call) else s for s in body])
        loop = plan.array.cores[0].body[-1]
        view = next(s.name for s in loop.body if isinstance(s, Acquire))
        call = dataclasses.replace(call, arguments=(Element(view, 0), *call.arguments[1:]))
        plan = with_body(plan, lambda body, call=call: [call if isinstance(s, Call) else s for s in body])
        plan = with_array(plan, buffers=(*plan.array.buffers, buffer))
        assert messages(plan) == expected


def walked(walk, port="produce", name="b", dtype="i32", elements=64, **changes):
    """The chain with a walk at an end: b's producer is the memory tile, c's the core."""
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


def test_walks_that_are_good():
    assert messages(walked([(2, 32), (4, 8), (4, 2), (2, 1)])) == []
    assert messages(walked([(2, 32), (4, 2), (8, 4)][:0] or [(4, 16), (4, 4), (4, 1)], name="c")) == []
    assert messages(walked([(8, 2), (4, 16), (2, 1)], dtype="bf16")) == []


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (
            walked([(2, 32), (2, 16), (2, 8), (2, 4), (4, 1)]),
            "[memory tile (0, 1), produce end of fifo b] dimensions: need 5, have 4",
        ),
        (
            walked([(2, 32), (2, 16), (4, 4), (4, 1)], name="c"),
            "[compute tile (0, 2), produce end of fifo c] dimensions: need 4, have 3",
        ),
        (walked([(4, 16), (8, 1)]), "elements of the walk: need 32, have 64 (a walk covers what one transfer moves)"),
        (walked([(4, 17), (16, 1)]), "last element of the walk: need 66, have 0..63"),
        (walked([(64, 0), (1, 1)]), "stride of dimension 0: need 1 or more, have 0"),
        (walked([(600, 2), (2, 1)], elements=1200), "size of dimension 0: need 600, have 512"),
        (
            # The compute tile's wrap register has 8 bits; aie-opt does not look.
            walked([(4, 300), (300, 1)], name="c", elements=1200),
            "size of dimension 1 in words: need 300, have 255",
        ),
        (
            # The compute tile's stride register has 13 bits; aie-opt does not look.
            walked([(2, 8193), (2, 1)], name="c", elements=8196),
            "stride of dimension 0 in words: need 8193, have 8192",
        ),
        (
            walked([(4, 17), (16, 1)], dtype="bf16"),
            "stride of dimension 0: need a multiple of 4 bytes, have 17 x 2 bytes",
        ),
        (walked([(9, 8), (7, 1)], dtype="bf16"), "innermost size: need a multiple of 4 bytes, have 7 x 2 bytes"),
        (walked([(2, 1), (32, 2)], dtype="bf16"), "innermost stride: need 1, have 2 (elements of 2 bytes, words of 4)"),
        (
            walked([(4, 16), (16, 1)], name="a"),
            "[shim tile (0, 0), produce end of fifo a] a walk: need none: the sequence's taps say it, have 2",
        ),
        (walked([(4, 16), (16, 1)], padding=((0, 1),)), "padding: need 2 dimensions, as the walk, have 1"),
        (
            walked([(4, 16), (16, 1)], padding=((0, 0), (0, 64))),
            "padding of dimension 0 from the inside: need 64, have 63",
        ),
        (
            walked([(4, 16), (16, 1)], padding=((32, 0), (0, 0))),
            "padding of dimension 1 from the inside: need 32, have 31",
        ),
        (
            walked([(4, 16), (16, 1)], dtype="bf16", padding=((0, 0), (1, 1))),
            "innermost padding: need a multiple of 2 elements, have (1, 1)",
        ),
    ],
)
def test_walks(plan, message):
    assert any(message in text for text in messages(plan)), messages(plan)


# --- Core programs --------------------------------------------------------------------------------------------------


def without(kind, number=0):
    """Drop the n-th statement of a kind."""

    def change(body):
        places = [i for i, statement in enumerate(body) if isinstance(statement, kind)]
        return [statement for i, statement in enumerate(body) if i != places[number]]

    return with_body(CHAIN, change)


def replaced(kind, **changes):
    """Change the first statement of a kind."""

    def change(body):
        place = next(i for i, statement in enumerate(body) if isinstance(statement, kind))
        return [*body[:place], dataclasses.replace(body[place], **changes), *body[place + 1 :]]

    return with_body(CHAIN, change)


CORES = {
    "missing release": (
        without(Release),
        "objects of fifo b (consume) to acquire: need more than the 1 held, have 1 (acquire counts what is held",
    ),
    "missing acquire": (
        with_body(CHAIN, lambda body: [s for s in body if not isinstance(s, (Acquire, Call))]),
        "[compute tile (0, 2)] objects of fifo b (consume) held to release: need 1, have 0",
    ),
    "nothing is ever released": (
        with_body(CHAIN, lambda body: [s for s in body if not isinstance(s, Release)]),
        "[compute tile (0, 2)] a statement that releases fifo c (produce): need 1, have 0",
    ),
    "too deep": (
        replaced(Acquire, count=3),
        "depth of fifo b (consume): need 3, have 2 (acquire holds that many in all)",
    ),
    "wrong end": (
        replaced(Acquire, port="produce"),
        "[compute tile (0, 2)] a produce end of fifo b on this tile: need 1, have 0",
    ),
    "used after release": (
        with_body(CHAIN, lambda body: sorted(body, key=lambda s: isinstance(s, Call))),
        "object of fifo b for scale: need held, have released before the call",
    ),
    "unknown view": (
        with_body(
            CHAIN,
            lambda body: [
                dataclasses.replace(s, arguments=(Element("other", 0), *s.arguments[1:])) if isinstance(s, Call) else s
                for s in body
            ],
        ),
        "view other for scale: need one acquired before, have none",
    ),
    "unknown buffer for a kernel": (
        with_body(
            CHAIN,
            lambda body: [
                dataclasses.replace(s, arguments=(BufferArgument("other"), *s.arguments[1:]))
                if isinstance(s, Call)
                else s
                for s in body
            ],
        ),
        "buffer other for scale: need one of the array's buffers, have none",
    ),
    "unknown buffer": (
        with_array(CHAIN, buffers=()),
        "buffer parameters: need one of the array's buffers, have none",
    ),
    "unknown kernel": (replaced(Call, kernel="other"), "kernel other: need one of the array's kernels, have none"),
    "missing argument": (replaced(Call, arguments=(3,)), "arguments of scale: need 3, have 1"),
    "index out of a view": (
        with_body(
            CHAIN,
            lambda body: [
                dataclasses.replace(s, arguments=(dataclasses.replace(s.arguments[0], index=1), *s.arguments[1:]))
                if isinstance(s, Call)
                else s
                for s in body
            ],
        ),
        "index into view",
    ),
    "wrong type": (with_fifo(CHAIN, "c", type=Type((32,), "i32")), "argument 1 of scale: need 64xi32, have 32xi32"),
    "number for an array": (
        replaced(Call, arguments=(3, 3, 3)),
        "argument 0 of scale: need 64xi32, have i32",
    ),
    "parameter out of range": (
        with_array(
            CHAIN,
            cores=(
                dataclasses.replace(
                    CORE, body=tuple(dataclasses.replace(s, index=16) if isinstance(s, Load) else s for s in CORE.body)
                ),
            ),
        ),
        "index into buffer parameters: need 16, have 0..15",
    ),
    "parameter of 16 bits": (
        with_array(CHAIN, buffers=(dataclasses.replace(CHAIN.array.buffers[0], type=Type((16,), "i16")),)),
        "element type of buffer parameters: need 32-bit integers, have 16xi16",
    ),
    "loop of unknown length": (
        with_array(CHAIN, cores=(dataclasses.replace(CORE, dynamic=False),)),
        "lowering of acquires in a loop: need dynamic, have static (the loop's length is a run-time parameter",
    ),
    "no such barrier": (
        with_array(CHAIN, barriers=()),
        "barrier barrier0_0_2: need one on this tile, have none",
    ),
    "barrier value": (
        with_array(
            CHAIN,
            cores=(
                dataclasses.replace(
                    CORE,
                    body=tuple(
                        dataclasses.replace(s, value=64) if isinstance(s, BarrierWait) else s for s in CORE.body
                    ),
                ),
            ),
        ),
        "value of barrier0_0_2: need 64, have 0..63",
    ),
}


@pytest.mark.parametrize("case", CORES)
def test_core_programs(case):
    plan, message = CORES[case]
    assert any(message in text for text in messages(plan)), messages(plan)


def window_given_up_one_by_one(dynamic):
    """Hold three objects, then give them up in a loop: three passes, or as many as a parameter says."""
    kind = tensor(64)
    a, c = ObjectFifo(kind, name="a", depth=4), ObjectFifo(kind, name="c")
    count = Buffer(initial_value=np.array([3], np.int32), name="count")

    def core(a, c, count):
        a.acquire(3)
        for _ in range_(count[0] if dynamic else 3):
            a.release(1)
        c.acquire(1)
        c.release(1)

    def sequence(x, z, a, c):
        a.fill(x)
        c.drain(z, wait=True)

    worker = Worker(core, [a.cons(), c.prod(), count], dynamic_objfifo_lowering=dynamic)
    return Program(NPU2(), Runtime(sequence, [tensor(192), kind, a.prod(), c.cons()]), [worker]).resolve_program()


def test_what_a_loop_leaves_held():
    assert messages(window_given_up_one_by_one(False)) == []
    assert (
        "[compute tile (0, 2)] objects of fifo a (consume) held after a pass of a loop: need 1, have 0"
        " (every pass must release what it acquires)"
    ) in messages(window_given_up_one_by_one(True))


# --- Sequences ------------------------------------------------------------------------------------------------------

STEPS = CHAIN.sequence.steps
FILL, DRAIN = (step for step in STEPS if isinstance(step, Transfer))


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
    "no such buffer": (with_step(CHAIN, Transfer, buffer="x"), "[transfer a_task0] the host buffer x: need 1, have 0"),
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
    "barrier name": (with_step(CHAIN, SetBarrier, barrier="x"), "[barrier x] a lock of that name: need 1, have 0"),
    "barrier value": (with_step(CHAIN, SetBarrier, value=64), "[barrier barrier0_0_2] value: need 64, have 0..63"),
    "wait without a token": (
        with_steps(CHAIN, *[dataclasses.replace(s, token=False) if s is DRAIN else s for s in STEPS]),
        "[transfer c_task1] a token to await: need 1, have 0 (start it with wait=True)",
    ),
    "awaited twice": (
        with_steps(CHAIN, *STEPS, Await("c_task1")),
        "[transfer c_task1] ends: need 2, have 1 (awaited or freed before)",
    ),
    "awaited before it starts": (
        with_steps(CHAIN, Await("c_task1"), *STEPS),
        "[transfer c_task1] a transfer started before its end: need 1, have 0",
    ),
    "freed while live": (
        with_steps(CHAIN, *STEPS[:-2], STEPS[-1], STEPS[-2]),
        "[transfer a_task0] completion known before Free: need yes, have no (await it, or a drain of its data",
    ),
    "never awaited": (
        with_steps(CHAIN, *STEPS[:-2]),
        "[transfer c_task1] an Await or a Free before the sequence ends: need 1, have 0",
    ),
    "started twice": (
        with_steps(CHAIN, *STEPS[:3], FILL, *STEPS[3:]),
        "[transfer a_task0] transfers of this name: need 2, have 1",
    ),
}


@pytest.mark.parametrize("case", SEQUENCES)
def test_sequences(case):
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
def test_taps_that_are_good(offset, walk, elements, dtype):
    plan = tapped(offset, *walk, elements=elements, dtype=dtype)
    assert not any(text.startswith("[transfer") for text in messages(plan)), messages(plan)


def tasks(count, *, awaited=False, step=1):
    """`count` pairs of a fill and a drain, at most `step` pairs at once if awaited."""
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


def test_task_queue():
    assert messages(tasks(4)) == []
    assert "[shim tile (0, 0)] tasks queued for fifo a: need 5, have 4" in messages(tasks(5))
    assert messages(tasks(100, awaited=True, step=4)) == []


def test_descriptors_live_at_once():
    longer = with_limits(LIMITS, task_queue=64)
    assert messages(tasks(8), longer) == []
    assert "[shim tile (0, 0)] buffer descriptors live at once: need 17, have 16" in messages(tasks(9), longer)


# --- Flow -----------------------------------------------------------------------------------------------------------


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
            with_fifo(CHAIN, "b", repeat_count=2),
            "[link a -> b] elements in a call: need [256] in, have [128] out",
        ),
        (
            with_step(CHAIN, Transfer, tap=Tap(0, (Dimension(128, 1),))),
            "[link a -> b] elements in a call: need [128] in, have [256] out",
        ),
    ],
)
def test_flow(plan, message):
    assert any(message in text for text in messages(plan)), messages(plan)


def test_a_fifo_that_nobody_drains():
    # Without the drain nothing says that the fill is complete, so it is awaited itself.
    fill = dataclasses.replace(FILL, token=True)
    plan = with_steps(CHAIN, *STEPS[:2], fill, Await(fill.name))
    message = "[fifo c] elements that its consumer at shim tile (0, 0) takes in a call: need 0, have 256"
    assert any(message in text for text in messages(plan))


def test_a_core_without_a_barrier_must_suit_all_its_fifos():
    """Two passes' worth of a, three passes' worth of b."""
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


def test_half_a_pass():
    plan = tasks(1)
    body = plan.array.cores[0].body
    plan = with_array(plan, cores=(Core(Place(0, 2), (*body, *body)),))
    assert any("passes of the core for fifo a (consume): need a whole number, have 0.5" in t for t in messages(plan))


def test_an_unreachable_fifo():
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


def test_a_load_of_free_names_its_transfer():
    assert Free("a_task0") in STEPS


def test_walk_of_a_joined_output_is_over_each_part():
    """dimensionsToStream of a join's output applies to every input's part (asked of aie-opt)."""
    kind, part = tensor(128), tensor(64)
    c = ObjectFifo(kind, name="c", to_stream=TensorAccessPattern.full((8, 8)).permute([1, 0]))
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


def test_names_of_types_in_messages():
    assert str(Type((2, 3), "bf16")) == "2x3xbf16"
    assert np.dtype(np.int32).itemsize == Type((), "i32").item_bytes
