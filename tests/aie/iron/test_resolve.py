# SPDX-License-Identifier: Apache-2.0
"""The recorder's choice of open places in a design."""

import pytest

from flownpu.aie.iron.compat import (
    NPU1,
    NPU2,
    ObjectFifo,
    Program,
    Runtime,
    Tile,
    Worker,
)
from flownpu.aie.iron.symbolic import RecordingError
from flownpu.aie.plan.data import Tile as Place
from tests.aie.small_programs import KIND, idle


def test_workers_beyond_tiles_are_refused():
    workers = [Worker(lambda: None) for _ in range(17)]
    with pytest.raises(RecordingError, match=r"\[tiles\] needs 17 compute tiles, npu1 has 16"):
        Program(NPU1(), Runtime(lambda: None), workers).resolve_program()


def adder(tile=None, *, host=None, link=None):
    """The place of a core between two fifos, the memory tile that forwards a to it, and the shim tiles of a and c."""
    a, c = ObjectFifo(KIND, name="a"), ObjectFifo(KIND, name="c")
    inner = a.cons().forward(tile=link, name="b")
    worker = Worker(idle, [inner.cons(), c.prod()], tile=tile)
    runtime = Runtime(lambda x, z, a, c: (a.fill(x), c.drain(z, wait=True)), [KIND, KIND, a.prod(tile=host), c.cons()])
    array = Program(NPU2(), runtime, [worker]).resolve_program().array
    fifos = {fifo.name: fifo for fifo in array.fifos}
    return array.cores[0].tile, fifos["a"].consumers[0].tile, fifos["a"].producer.tile, fifos["c"].consumers[0].tile


def test_column_or_row_alone_is_kept():
    """Open places follow the core; given places stay, however far from the core they are."""
    assert adder(Tile(col=5)) == (Place(5, 2), Place(5, 1), Place(5, 0), Place(5, 0))
    assert adder(Tile(row=4)) == (Place(0, 4), Place(0, 1), Place(0, 0), Place(0, 0))
    assert adder(Tile(col=5), link=Tile(col=3)) == (Place(5, 2), Place(3, 1), Place(3, 0), Place(5, 0))
    assert adder(Tile(col=5), host=Tile(col=7)) == (Place(5, 2), Place(5, 1), Place(7, 0), Place(5, 0))


def test_workers_with_column_are_placed_first():
    workers = [Worker(lambda: None) for _ in range(2)] + [Worker(lambda: None, tile=Tile(col=0)) for _ in range(3)]
    array = Program(NPU2(), Runtime(lambda: None), workers).resolve_program().array
    assert [core.tile for core in array.cores] == [Place(*at) for at in [(0, 5), (1, 2), (0, 2), (0, 3), (0, 4)]]


def test_workers_beyond_column_are_refused():
    workers = [Worker(lambda: None, tile=Tile(col=6)) for _ in range(5)]
    with pytest.raises(
        RecordingError, match=r"\[tiles\] needs 5 compute tiles, and one of them in column 6, where none is left"
    ):
        Program(NPU2(), Runtime(lambda: None), workers).resolve_program()
