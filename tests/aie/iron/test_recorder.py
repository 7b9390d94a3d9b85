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
    Kernel,
    ObjectFifo,
    Program,
    Runtime,
    Worker,
    range_,
)
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
from tests.aie.small_programs import chain, idle, one_core, tensor


def vector_add(device, count=4, elements=256):
    kind, host = tensor(elements), tensor(count * elements)
    a, b, c = (ObjectFifo(kind, name=name) for name in "abc")
    add = Kernel("add", "add.cc", [kind, kind, kind])

    def core(a, b, c, add):
        for _ in range_(count):
            x, y, z = a.acquire(1), b.acquire(1), c.acquire(1)
            add(x, y, z)
            for fifo in (a, b, c):
                fifo.release(1)

    def sequence(x, y, z, a, b, c):
        a.fill(x)
        b.fill(y)
        c.drain(z, wait=True)

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


def test_access_pattern_equals_same_walk_in_other_form():
    full = TensorAccessPattern([8, 32], 0, [8, 32], [32, 1])
    assert full == TensorAccessPattern([8, 32], 0, [1, 8, 1, 32], [0, 32, 7, 1])
    assert full != TensorAccessPattern([8, 32], 0, [32, 8], [1, 32])
    assert hash(full) == hash(TensorAccessPattern([8, 32], 0, [8, 1, 32], [32, 5, 1]))
    assert full.coalesce().walk == (Dimension(256, 1),)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TensorAccessPattern([8], 0, [8], [2]), "reaches element 14 of a tensor of 8"),
        (lambda: TensorAccessPattern([8], 0, [8], [1, 1]), "as many strides as sizes"),
        (lambda: TensorAccessPattern([8], 0, [0], [1]), "sizes of 1 or more"),
    ],
)
def test_impossible_access_patterns_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_release_is_recorded_in_its_place():
    plan = one_core(idle)
    kinds = [type(statement) for statement in plan.array.cores[0].body]
    assert kinds == [Acquire, Acquire, Release, Release]
    assert not any(isinstance(statement, Loop) for statement in plan.array.cores[0].body)
