# SPDX-License-Identifier: Apache-2.0
"""Limits of resources: memory, channels, descriptors, locks, walks.

Each limit is broken once; the message names the place, the need and the finding.
"""

import dataclasses

import pytest

from flownpu.aie.iron.compat import NPU2, Buffer, ObjectFifo, Program, Runtime, Tile, Worker
from flownpu.aie.plan.data import Acquire, Barrier, BufferArgument, Call, Element, TileBuffer, Type
from flownpu.aie.plan.data import Tile as Place
from tests.aie.check.faults import CHAIN, messages, moved, walked
from tests.aie.small_programs import chain, tensor, with_array, with_body, with_end


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
    """`count` streams through one memory tile, each to a separate core."""
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


def test_core_memory_equals_hand_count():
    """64512 bytes beside a stack of 1024 fit, eight more do not (a real aie-opt says so of both).

    Those that fit leave no room for constants, which the checker reports.
    """
    fit, over = (many(1, 1, elements=n // 4, depth=1) for n in (32256, 32260))
    assert all("memory beside stack and buffers: need 1024 bytes, have 0 bytes" in text for text in messages(fit))
    assert messages(over) == [
        "[compute tile (0, 2)] memory: need 65544 bytes, have 65536 bytes (c0 1 x 32260 + a0 1 x 32260 + stack 1024)"
    ]


def test_core_without_room_for_constants_is_refused():
    """Stack, two objects of 256 bytes of each of two fifos, 64 bytes of parameters and a word that holds two counters.

    On npu2 each begins at a multiple of 64 bytes, as mlir-aie's test/assign-buffer-addresses/vector_alignment.mlir has
    it, and so does the region of the constants.
    """
    used = 1024 + 2 * 2 * 256 + 64 + 64
    program = chain()

    def with_buffer(size):
        more = TileBuffer("more", Place(0, 2), Type((size // 4,), "i32"))
        return with_array(program, buffers=(*program.array.buffers, more))

    assert messages(with_buffer(65536 - used - 1024)) == []
    assert messages(with_buffer(65536 - used - 1020)) == [
        "[compute tile (0, 2)] memory beside stack and buffers: need 1024 bytes, have 960 bytes "
        "(constants of its kernels go there)"
    ]


def test_memory_of_memory_tile_equals_hand_count():
    """32 objects that fill 524288 bytes fit, larger ones do not; aie-opt would move some a column on, silently."""
    fit, over = (
        with_end(pass_through(1, elements=n // 4), "a0", "consume", depth=d) for n, d in ((16384, 32), (16388, 32))
    )
    assert not any("memory:" in text for text in messages(fit))
    assert "[memory tile (0, 1)] memory: need 524416 bytes, have 524288 bytes (a0 32 x 16388)" in messages(over)


def test_object_beyond_descriptor_length_is_refused():
    """The object fits, but its length does not fit a descriptor's 17 bits."""
    whole = 524288 // 4
    plan = with_end(pass_through(1, elements=whole), "a0", "consume", depth=1)
    message = "[memory tile (0, 1)] length of an object of a0 in words: need 131072, have 131071"
    assert message in messages(plan)
    assert not any(text.startswith("[memory tile (0, 1)] memory") for text in messages(plan))


def test_object_counters_are_counted_as_memory():
    """A core that counts its objects at run time has a word for each fifo; a real aie-opt allocates the same."""
    plan = many(1, 1, elements=8064, depth=1)
    core = plan.array.cores[0]
    assert not any("] memory:" in text for text in messages(plan))
    (message,) = messages(with_array(plan, cores=(dataclasses.replace(core, dynamic=True),)))
    assert message.startswith("[compute tile (0, 2)] memory: need 65544 bytes, have 65536 bytes")
    assert "object counters 8" in message


def test_stack_and_buffers_are_counted_as_memory():
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
        (pass_through(5, depth=5), "[memory tile (0, 1)] buffer descriptors: need 50, have 48"),
    ],
)
def test_surplus_channels_and_descriptors_are_refused(plan, message):
    assert any(text.startswith(message) for text in messages(plan)), messages(plan)


def test_surplus_locks_are_refused():
    buffers, names = CHAIN.array.buffers, [Barrier(f"gate{i}", Place(0, 2)) for i in range(12)]
    plan = with_array(CHAIN, barriers=(*CHAIN.array.barriers, *names), buffers=buffers)
    # b and c have a pair each, and there is the chain's own barrier.
    assert "[compute tile (0, 2)] locks: need 17, have 16" in messages(plan)


def test_lock_value_beyond_limit_is_refused():
    plan = with_end(CHAIN, "a", "consume", depth=64)
    assert "[memory tile (0, 1)] lock value of fifo a: need 64, have 63" in messages(plan)


def test_memory_is_within_reach_of_neighbours_only():
    near, far = (TileBuffer("state", Place(*tile), Type((64,), "i32")) for tile in ((0, 3), (1, 2)))
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


def test_valid_walks_pass():
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
            # The compute tile's wrap register has 8 bits; aie-opt does not check it.
            walked([(4, 300), (300, 1)], name="c", elements=1200),
            "size of dimension 1 in words: need 300, have 255",
        ),
        (
            # The compute tile's stride register has 13 bits; aie-opt does not check it.
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
    ],
)
def test_faulty_walk_is_refused(plan, message):
    assert any(message in text for text in messages(plan)), messages(plan)
