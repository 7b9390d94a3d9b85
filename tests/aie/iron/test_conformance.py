# SPDX-License-Identifier: Apache-2.0
"""Small programs in the style of mlir-aie's examples: recorded, checked, printed as MLIR, and emulated against numpy.

Upstream's programs (written anew here, in IRON of generation C): programming_examples/basic/{vector_vector_add,
matrix_multiplication/matrix_vector, passthrough_dmas, dma_transpose, matrix_scalar_add}, and those of
programming_guide/section-2 that split, join and broadcast.
"""

import numpy as np
import pytest

from flownpu.aie.iron.compat import (
    NPU1,
    NPU2,
    Kernel,
    ObjectFifo,
    Program,
    Runtime,
    TensorAccessPattern,
    Tile,
    Worker,
    range_,
)
from flownpu.aie.mlir.module import to_mlir
from tests.aie.emulation import emulate, plan_of
from tests.aie.small_programs import split_and_join, tensor

DEVICES = pytest.mark.parametrize("device", [NPU1(), NPU2()], ids=lambda device: device.target)


def run(program, functions=None, **buffers):
    """Takes a program through all stages: recorder and checker, printer, and emulator under a few schedules."""
    plan = plan_of(program)
    assert to_mlir(plan).count("aie.objectfifo @") == len(plan.array.fifos)
    results = [emulate(plan, seed=seed, functions=functions, **buffers) for seed in range(5)]
    for other in results[1:]:
        assert all(other[name].tobytes() == results[0][name].tobytes() for name in other)
    return results[0]


def random(rng, *shape, dtype=np.int32):
    return rng.integers(-1000, 1000, shape).astype(dtype)


@DEVICES
def test_matrix_vector_equals_numpy(device, rng):
    """i16 tiles of A go through memory tiles, by pairs of columns; x is broadcast once for each row of tiles."""
    rows, columns, m, k, cores = 256, 288, 32, 32, 4
    a_tile, x_tile, y_tile = tensor(m * k, dtype=np.int16), tensor(k, dtype=np.int16), tensor(m)
    share = rows // m // cores
    by_pairs = TensorAccessPattern([m, k], 0, [k // 2, m, 2], [2, k, 1])
    x = ObjectFifo(x_tile, name="x")
    zero = Kernel("zero", "mv.o", [y_tile])
    multiply = Kernel("multiply", "mv.o", [a_tile, x_tile, y_tile])

    def core(a, x, y, zero, multiply):
        for _ in range_(share):
            total = y.acquire(1)
            zero(total)
            for _ in range_(columns // k):
                multiply(a.acquire(1), x.acquire(1), total)
                a.release(1)
                x.release(1)
            y.release(1)

    streams, outputs, workers = [], [], []
    for column in range(cores):
        streams.append(ObjectFifo(a_tile, name=f"a{column}"))
        outputs.append(ObjectFifo(y_tile, name=f"y{column}"))
        inner = streams[-1].cons().forward(to_stream=by_pairs)
        workers.append(Worker(core, [inner.cons(), x.cons(), outputs[-1].prod(), zero, multiply], tile=Tile(column, 2)))

    def sequence(a, b, c, x, streams, outputs):
        x.fill(b, tap=TensorAccessPattern([columns], 0, [share, columns], [0, 1]))
        for core, (stream, output) in enumerate(zip(streams, outputs, strict=True)):
            sizes, strides = [share, columns // k, m, k], [m * columns, k, columns, 1]
            first = core * share * m
            stream.fill(a, tap=TensorAccessPattern([rows * columns], first * columns, sizes, strides))
            output.drain(c, tap=TensorAccessPattern([rows], first, [share * m], [1]), wait=True)

    host = [tensor(rows * columns, dtype=np.int16), tensor(columns, dtype=np.int16), tensor(rows)]
    ends = [x.prod(), [stream.prod() for stream in streams], [output.cons() for output in outputs]]
    matrix, vector = random(rng, rows, columns, dtype=np.int16), random(rng, columns, dtype=np.int16)

    def multiply_tile(a, x, y):
        y += a.reshape(k // 2, m, 2).swapaxes(0, 1).reshape(m, k).astype(np.int32) @ x.astype(np.int32)

    functions = {"zero": lambda y: y.fill(0), "multiply": multiply_tile}
    found = run(Program(device, Runtime(sequence, [*host, *ends]), workers), functions, a=matrix, b=vector)
    np.testing.assert_array_equal(found["c"], matrix.astype(np.int32) @ vector)


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_split_and_joined_data_equals_numpy(parts, rng):
    """A memory tile splits an object among several cores, and joins their results."""
    x = random(rng, 12, parts, 64 // parts)
    found = run(split_and_join(parts), {"add": lambda x, y, number: np.add(x, number, out=y)}, x=x)
    np.testing.assert_array_equal(found["z"], (x + np.arange(parts)[:, None]).ravel())


# Offset, sizes and strides of walks over a tensor [48, 64], and numpy's form of each.
WALKS = {
    "as it lies": (0, [48, 64], [64, 1], lambda array: array),
    "transposed": (0, [64, 48], [1, 64], lambda array: array.T),
    "a tile": (8 * 64 + 16, [16, 32], [64, 1], lambda array: array[8:24, 16:48]),
    "every third row": (0, [16, 64], [192, 1], lambda array: array[::3]),
    "in tiles": (0, [6, 4, 8, 16], [512, 16, 64, 1], lambda array: array.reshape(6, 8, 4, 16).swapaxes(1, 2)),
    "twice": (4 * 64, [2, 4, 64], [0, 64, 1], lambda array: np.stack([array[4:8]] * 2)),
}


@pytest.mark.parametrize("walk", WALKS)
@pytest.mark.parametrize("into", [True, False], ids=["fill", "drain"])
def test_access_patterns_equal_numpy(walk, into, rng):
    """A DMA's tap, on the way in or out; the array between only passes the data on, without a core."""
    offset, sizes, strides, numpys = WALKS[walk]
    if not into and walk == "twice":
        sizes, strides, numpys = sizes[1:], strides[1:], lambda array: array[4:8]
    array = random(rng, 48, 64)
    tap, walked = TensorAccessPattern([48, 64], offset, sizes, strides), numpys(array)
    a = ObjectFifo(tensor(64), name="a")
    out = a.cons().forward(name="c")

    def sequence(x, z, a, c):
        a.fill(x, tap=tap if into else None)
        c.drain(z, tap=None if into else tap, wait=True)

    host = [array.shape, (walked.size,)] if into else [(walked.size,), array.shape]
    program = Program(NPU2(), Runtime(sequence, [*(tensor(*shape) for shape in host), a.prod(), out.cons()]), [])
    if into:
        np.testing.assert_array_equal(run(program, x=array)["z"], walked.ravel())
        return
    found = run(program, x=np.ascontiguousarray(walked))["z"].reshape(array.shape)
    np.testing.assert_array_equal(numpys(found), walked)
    assert np.count_nonzero(found == -1) >= array.size - walked.size  # the rest is as it was: all ones


@DEVICES
def test_broadcast_with_skip_equals_numpy(device, rng):
    """An object goes to a core and, through a memory tile, to a second that adds it to the first's result (a skip)."""
    tile, count = tensor(64), 8
    a, c = ObjectFifo(tile, name="a"), ObjectFifo(tile, name="c")
    first = ObjectFifo(tile, name="first")
    skipped = a.cons(depth=4).forward(name="skipped", tile=Tile(0, 1), depth=4)
    double = Kernel("double", "skip.o", [tile, tile])
    add = Kernel("add", "skip.o", [tile, tile, tile])

    def doubling(a, first, double):
        for _ in range_(count):
            double(a.acquire(1), first.acquire(1))
            a.release(1)
            first.release(1)

    def adding(first, skipped, c, add):
        for _ in range_(count):
            add(first.acquire(1), skipped.acquire(1), c.acquire(1))
            for end in (first, skipped, c):
                end.release(1)

    def sequence(x, z, a, c):
        a.fill(x)
        c.drain(z, wait=True)

    workers = [
        Worker(doubling, [a.cons(), first.prod(), double], tile=Tile(0, 2)),
        Worker(adding, [first.cons(), skipped.cons(), c.prod(), add], tile=Tile(1, 3)),
    ]
    program = Program(device, Runtime(sequence, [tensor(64 * count)] * 2 + [a.prod(), c.cons()]), workers)
    x = random(rng, count * 64)
    functions = {"double": lambda x, y: np.multiply(x, 2, out=y), "add": lambda x, y, z: np.add(x, y, out=z)}
    np.testing.assert_array_equal(run(program, functions, x=x)["z"], 3 * x)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_split_broadcast_equals_numpy(order, rng):
    """Two cores take halves through a memory tile, and a third core the whole, in either order of consumers."""
    tile, half, count = tensor(64), tensor(32), 6
    a = ObjectFifo(tile, name="a")
    ends = {}
    for place in order:
        ends[place] = a.cons()
    parts = ends[0].split([0, 32], Tile(1, 1), obj_types=[half] * 2)
    outs = [ObjectFifo(kind, name=f"c{place}") for place, kind in enumerate((half, half, tile))]
    copies = [Kernel(name, "copy.o", [kind, kind]) for name, kind in (("half", half), ("half", half), ("whole", tile))]

    def core(a, c, copy):
        for _ in range_(count):
            copy(a.acquire(1), c.acquire(1))
            a.release(1)
            c.release(1)

    def sequence(x, z0, z1, z2, a, outs):
        a.fill(x)
        for out, target in zip(outs, (z0, z1, z2), strict=True):
            out.drain(target, wait=True)

    ins = [parts[0].cons(), parts[1].cons(), ends[1]]
    workers = [
        Worker(core, [taken, out.prod(), copy], tile=Tile(column, 2))
        for column, (taken, out, copy) in enumerate(zip(ins, outs, copies, strict=True))
    ]
    host = [tensor(count * 64), tensor(count * 32), tensor(count * 32), tensor(count * 64)]

    program = Program(NPU2(), Runtime(sequence, [*host, a.prod(), [out.cons() for out in outs]]), workers)
    x = random(rng, count, 2, 32)
    copy = lambda x, y: np.copyto(y, x)  # noqa: E731
    found = run(program, {"half": copy, "whole": copy}, x=x)
    np.testing.assert_array_equal(found["z2"], x.ravel())
    for place in range(2):
        np.testing.assert_array_equal(found[f"z{place}"], x[:, place].ravel())
