# SPDX-License-Identifier: Apache-2.0
"""Programs in the style of mlir-aie's examples, recorded.

Upstream's files (their API, generation C): programming_examples/basic/{vector_scalar_mul, vector_vector_add,
row_wise_bias_add, matrix_multiplication}, programming_guide/section-2 (split, join, broadcast), python/helpers/taplib.
"""

import numpy as np
import pytest

from flownpu.aie.check import check
from flownpu.aie.iron.access_pattern import TensorAccessPattern
from flownpu.aie.iron.compat import (
    NPU1,
    NPU2,
    ExternalFunction,
    Kernel,
    ObjectFifo,
    Program,
    Runtime,
    TaskGroup,
    Worker,
    range_,
)
from flownpu.aie.plan.as_json import from_json, to_json
from flownpu.aie.plan.data import (
    Acquire,
    Await,
    Call,
    Dimension,
    Element,
    Free,
    Load,
    Loop,
    Operation,
    Release,
    Transfer,
    Variable,
)
from flownpu.aie.plan.data import Tile as Place
from tests.aie.small_programs import chain, idle, indices, one_core, tensor


def vector_add(device, count=4, elements=256):
    kind, host = tensor(elements), tensor(count * elements)
    a, b, c = (ObjectFifo(kind, name=name) for name in "abc")
    add = ExternalFunction("add", source_file="add.cc", arg_types=[kind, kind, kind])

    def core(a, b, c, add):
        for _ in range_(count):
            x, y, z = a.acquire(1), b.acquire(1), c.acquire(1)
            add(x, y, z)
            for fifo in (a, b, c):
                fifo.release(1)

    def sequence(x, y, z, a, b, c):
        group = TaskGroup()
        a.fill(x, group=group)
        b.fill(y, group=group)
        c.drain(z, wait=True, group=group)
        group.finish()

    worker = Worker(core, [a.cons(), b.cons(), c.prod(), add])
    return Program(device, Runtime(sequence, [host] * 3 + [a.prod(), b.prod(), c.cons()]), [worker]).resolve_program()


@pytest.mark.parametrize("device", [NPU1(), NPU2()], ids=lambda device: device.target)
def test_vector_add_is_recorded(device):
    plan = vector_add(device)
    assert check(plan) == []
    (core,) = plan.array.cores
    assert core.tile == Place(0, 2)
    (loop,) = core.body
    assert (loop.start, loop.stop, loop.step) == (0, 4, 1)
    acquired = [(s.fifo, s.port) for s in loop.body if isinstance(s, Acquire)]
    assert acquired == [("a", "consume"), ("b", "consume"), ("c", "produce")]
    names = [s.name for s in loop.body if isinstance(s, Acquire)]
    assert loop.body[3] == Call("add", tuple(Element(name, 0) for name in names))
    assert [type(step) for step in plan.sequence.steps] == [Transfer] * 3 + [Await, Free, Free]
    # All fifo ends at the host are in column 0: two inputs and the output share one shim tile.
    assert {end.tile for fifo in plan.array.fifos for end in (fifo.producer, *fifo.consumers)} == {
        Place(0, 0),
        Place(0, 2),
    }


def test_plan_survives_json():
    for plan in (vector_add(NPU2()), chain()):
        assert from_json(to_json(plan)) == plan


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"kind": "Plan", "name": "x"}', "a Plan has other fields"),
        ('{"kind": "Tile", "column": 1, "row": 2}', "expected a Plan, got Tile"),
        ('{"a": 1}', "got one of kind None"),
    ],
)
def test_json_that_is_no_plan_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        from_json(text)


def test_loops_of_any_length_are_one_statement():
    plan = chain(passes=4)
    (core,) = plan.array.cores
    loop = core.body[-1]
    load = next(statement for statement in core.body if isinstance(statement, Load))
    assert loop.stop == Variable(load.variable)
    assert plan.array == chain(passes=4000).array, "a shape that enters by a parameter does not change the array"


def test_index_arithmetic_is_recorded():
    kind = tensor(16)
    a, c = ObjectFifo(kind, name="a"), ObjectFifo(kind, name="c")
    use = Kernel("use", "use.cc", [kind, kind, np.int32])

    def core(a, c, use):
        for i in range_(2, 8, 2):
            for j in range_(3):
                x, y = a.acquire(1), c.acquire(1)
                use(x, y, 1 + i * 3 - j)
                a.release(1)
                c.release(1)

    def sequence(x, z, a, c):
        a.fill(x)
        c.drain(z, wait=True)

    runtime = Runtime(sequence, [tensor(16 * 9)] * 2 + [a.prod(), c.cons()])
    plan = Program(NPU2(), runtime, [Worker(core, [a.cons(), c.prod(), use])]).resolve_program()
    assert check(plan) == []
    (outer,) = plan.array.cores[0].body
    (inner,) = outer.body
    i, j = Variable(outer.variable), Variable(inner.variable)
    call = next(statement for statement in inner.body if isinstance(statement, Call))
    assert (outer.start, outer.stop, outer.step) == (2, 8, 2)
    assert call.arguments[2] == Operation("-", Operation("+", 1, Operation("*", i, 3)), j)


def test_sliding_window_is_recorded():
    """Hold three objects, release one: the view's elements are the window, oldest first."""
    kind = tensor(16)
    a, c = ObjectFifo(kind, name="a", depth=4), ObjectFifo(kind, name="c")
    blur = Kernel("blur", "blur.cc", [kind, kind, kind, kind])

    def core(a, c, blur):
        for _ in range_(8):
            window, out = a.acquire(3), c.acquire(1)
            blur(window[0], window[1], window[2], out)
            a.release(1)
            c.release(1)
        a.release(2)

    def sequence(x, z, a, c):
        a.fill(x)
        c.drain(z, wait=True)

    runtime = Runtime(sequence, [tensor(160), tensor(128), a.prod(), c.cons()])
    plan = Program(NPU2(), runtime, [Worker(core, [a.cons(), c.prod(), blur])]).resolve_program()
    assert check(plan) == []


# --- Walks: against numpy's own indexing ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("walk", "expected"),
    [
        (lambda full: full, lambda array: array),
        (lambda full: full[2:6, 8:24], lambda array: array[2:6, 8:24]),
        (lambda full: full[3], lambda array: array[3]),
        (lambda full: full[1:7:3, ::2], lambda array: array[1:7:3, ::2]),
        (lambda full: full.permute([1, 0]), lambda array: array.T),
        (lambda full: full.split(1, 8).permute([1, 0, 2]), lambda array: array.reshape(8, 4, 8).transpose(1, 0, 2)),
        (lambda full: full[:, 4:12].repeat(3), lambda array: np.broadcast_to(array[:, 4:12], (3, 8, 8))),
        (lambda full: full.split(0, 4).split(2, 8).coalesce(), lambda array: array),
    ],
)
def test_access_patterns_are_recorded(walk, expected):
    array = np.arange(8 * 32).reshape(8, 32)
    pattern = walk(TensorAccessPattern.full((8, 32)))
    np.testing.assert_array_equal(indices(pattern.walk, pattern.offset), expected(array).ravel())


def test_access_pattern_equals_same_walk_in_other_form():
    full = TensorAccessPattern.full((8, 32))
    assert full == TensorAccessPattern([8, 32], 0, [1, 8, 1, 32], [0, 32, 7, 1])
    assert full != full.permute([1, 0])
    assert hash(full) == hash(TensorAccessPattern([8, 32], 0, [8, 32], [32, 1]))
    assert full.coalesce().walk == (Dimension(256, 1),)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TensorAccessPattern([8], 0, [8], [2]), "reaches element 14 of a tensor of 8"),
        (lambda: TensorAccessPattern([8], 0, [8], [1, 1]), "as many strides as sizes"),
        (lambda: TensorAccessPattern([8], 0, [0], [1]), "sizes of 1 or more"),
        (lambda: TensorAccessPattern.full((8, 6)).split(1, 4), "of size 6 is no multiple of 4"),
        (lambda: TensorAccessPattern.full((8, 6)).permute([0, 0]), "expected a permutation"),
        (lambda: TensorAccessPattern.full((8, 6)).pad([(1, 1), (0, 0)]).repeat(2), "apply pad"),
        (lambda: TensorAccessPattern.full((8, 6))[4:2], "goes forwards and is not empty"),
    ],
)
def test_impossible_access_patterns_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


# --- Task groups, tiles and releases --------------------------------------------------------------------------------


@pytest.mark.parametrize(("depth", "most"), [(1, 1), (2, 2), (3, 3)])
def test_pipelined_groups_are_recorded(depth, most):
    """A group is finished when `depth` - 1 groups after it have started, the last ones at the end."""

    def sequence(x, z, a, c):
        for _, group in TaskGroup.pipelined(4, depth=depth):
            a.fill(x, group=group)
            c.drain(z, wait=True, group=group)

    steps = one_core(idle, sequence=sequence).sequence.steps
    drains = [("start" if isinstance(s, Transfer) else "end") for s in steps if getattr(s, "fifo", "c") == "c"
              and not isinstance(s, Free)]  # fmt: skip
    open_groups = np.cumsum([1 if kind == "start" else -1 for kind in drains])
    assert (max(open_groups), open_groups[-1], drains.count("start")) == (most, 0, 4)
    awaited = [step.transfer for step in steps if isinstance(step, Await)]
    assert awaited == [step.name for step in steps if isinstance(step, Transfer) and step.fifo == "c"]


def test_tiles_of_walk_cover_tensor():
    """The tiles of a matrix one after the other, each row by row, as numpy cuts it."""
    matrix = np.arange(6 * 8).reshape(6, 8)
    tiled = TensorAccessPattern.full((6, 8)).tile((3, 2))
    tiles = matrix.reshape(2, 3, 4, 2).swapaxes(1, 2)
    np.testing.assert_array_equal(indices(tiled.walk), tiles.ravel())
    np.testing.assert_array_equal(indices(tiled[1, 2].walk, tiled[1, 2].offset), tiles[1, 2].ravel())
    by_columns = tiled.permute([1, 0, 2, 3])
    np.testing.assert_array_equal(indices(by_columns.walk), tiles.swapaxes(0, 1).ravel())
    with pytest.raises(ValueError, match=r"a tile's size in each of \[6, 8\], got \[3\]"):
        TensorAccessPattern.full((6, 8)).tile((3,))


def test_release_is_recorded_in_its_place():
    plan = one_core(idle)
    kinds = [type(statement) for statement in plan.array.cores[0].body]
    assert kinds == [Acquire, Acquire, Release, Release]
    assert not any(isinstance(statement, Loop) for statement in plan.array.cores[0].body)
