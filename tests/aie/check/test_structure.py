# SPDX-License-Identifier: Apache-2.0
"""Limits of structure: places, links, splits and joins.

Each limit is broken once; the message names the place, the need and the finding.
"""

import dataclasses

import pytest

from flownpu.aie.iron.compat import NPU2, Kernel, ObjectFifo, Program, Runtime, Tile, Worker
from flownpu.aie.plan.data import Link, Store, Type, Variable
from flownpu.aie.plan.data import Tile as Place
from tests.aie.check.faults import BUFFER, CHAIN, CORE, messages, moved
from tests.aie.small_programs import tensor, with_array, with_fifo

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
    "two ends on a tile": (
        with_fifo(CHAIN, "b", consumers=CHAIN.array.fifos[0].consumers * 2),
        "[fifo b] consumers on compute tile (0, 2): need 2, have 1",
    ),
    "a variable without a loop": (
        with_array(CHAIN, cores=(dataclasses.replace(CORE, body=(Store("extra", Variable("i"), 0), *CORE.body)),)),
        "[compute tile (0, 2)] the variable i: need a loop around it or a load before, have none",
    ),
    "links in a chain": (
        with_array(CHAIN, links=(LINK, Link(("b",), ("c",)))),
        "[fifo b] links: need 2, have 1 (a fifo cannot be in more than one link",
    ),
    "two links of an input": (
        with_array(CHAIN, links=(LINK, LINK)),
        "[fifo a] links that have it as input: need 2, have 1",
    ),
    "forward of other types": (
        with_fifo(CHAIN, "b", type=Type((64,), "u32")),
        "[link a -> b] element type: need 64xi32, have 64xu32",
    ),
    "link of a broadcast that ends elsewhere": (
        with_fifo(CHAIN, "a", consumers=(A.consumers[0], dataclasses.replace(A.consumers[0], tile=Place(1, 1)))),
        "[fifo a] a user of its consume end at memory tile (1, 1): need a link, have none",
    ),
    "link of a broadcast that meets nowhere": (
        with_fifo(CHAIN, "a", consumers=tuple(dataclasses.replace(A.consumers[0], tile=Place(x, 1)) for x in (1, 2))),
        "[fifo a] a user of its consume end at memory tile (1, 1): need a link, have none",
    ),
    "link on a shim tile": (
        moved(moved(CHAIN, "a", "consume", 0, 0), "b", "produce", 0, 0),
        "[link a -> b] memory to link in: need a compute or memory tile, have shim tile (0, 0)",
    ),
    "forward of odd sizes": (
        with_fifo(CHAIN, "b", type=Type((40,), "i32")),
        "[link a -> b] object sizes: need one a multiple of the other, have 64xi32 and 40xi32",
    ),
}


@pytest.mark.parametrize("case", STRUCTURE)
def test_faulty_structure_is_refused(case):
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
        # aie-opt accepts 100 elements in parts of 64 at 0 and 64 without a message, and moves elements that do not
        # exist.
        ([0, 64], 64, "coverage of a by a_split1: need objects that fill elements 64..99 exactly, have objects of 64"),
        ([0, 40], 40, "coverage of a by a_split1: need objects that fill elements 40..99 exactly, have objects of 40"),
        ([4, 52], 48, "offsets: need ascending from 0, below 100, have [4, 52]"),
        ([0, 0], 50, "offsets: need ascending from 0, below 100, have [0, 0]"),
        ([0, 100], 100, "offsets: need ascending from 0, below 100, have [0, 100]"),
    ],
)
def test_parts_that_do_not_tile_object_are_refused(offsets, part, message):
    assert any(message in text for text in messages(split_plan(offsets, part)))


def test_split_covering_its_object_passes():
    assert messages(split_plan([0, 52], 52, 104)) == []


def test_split_part_of_other_type_is_refused():
    plan = with_fifo(split_plan([0, 52], 52, 104), "a_split1", type=Type((52,), "u32"))
    assert "[link a -> a_split0, a_split1] element type of a_split1: need i32, have u32" in messages(plan)
