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


def test_open_places_follow_core_and_given_ones_stay():
    assert adder() == (Place(0, 2), Place(0, 1), Place(0, 0), Place(0, 0))
    assert adder(Tile(5, 3)) == (Place(5, 3), Place(5, 1), Place(5, 0), Place(5, 0))
    assert adder(Tile(5, 2), link=Tile(3, 1)) == (Place(5, 2), Place(3, 1), Place(3, 0), Place(5, 0))
    assert adder(Tile(5, 2), host=Tile(7, 0)) == (Place(5, 2), Place(5, 1), Place(7, 0), Place(5, 0))


def test_open_workers_take_tiles_that_are_left():
    workers = [Worker(lambda: None), Worker(lambda: None, tile=Tile(0, 2)), Worker(lambda: None)]
    array = Program(NPU2(), Runtime(lambda: None), workers).resolve_program().array
    assert [core.tile for core in array.cores] == [Place(0, 3), Place(0, 2), Place(0, 4)]


def test_column_without_row_is_refused():
    with pytest.raises(RecordingError, match="expected a column and a row, or neither, got 3 and None"):
        Tile(3)
