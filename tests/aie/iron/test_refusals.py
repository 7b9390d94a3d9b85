# SPDX-License-Identifier: Apache-2.0
"""Refusals of the recorder: names, options, and impossible actions of a core, a sequence or a fifo."""

# ruff: noqa: ARG001, ARG005  what a core or a sequence is given is its interface, used or not

import numpy as np
import pytest

from flownpu.aie.iron.access_pattern import TensorAccessPattern
from flownpu.aie.iron.compat import (
    NPU2,
    Buffer,
    Kernel,
    ObjectFifo,
    Program,
    Runtime,
    Worker,
    range_,
)
from flownpu.aie.iron.symbolic import RecordingError
from tests.aie.small_programs import KIND, idle, one_core, tensor

COPY = Kernel("copy", "copy.cc", [KIND, KIND])
WITH_INTEGER, WITH_FLOAT = (Kernel("scaled", "scaled.cc", [kind]) for kind in (np.int32, np.float32))


def break_out(a, c):
    for _ in range_(4):
        a.acquire(1)
        a.release(1)
        break


def branch(a, c):
    for i in range_(4):
        if i == 2 or i > 2:
            a.acquire(1)


@pytest.mark.parametrize(
    ("core", "arguments", "message"),
    [
        (lambda a, c: a.acquire(3), (), r"\[ObjectFifo a\] acquire expected 1..2 \(its depth\), got 3"),
        (lambda a, c: a.release(0), (), r"release expected 1..2"),
        (lambda a, c, copy: copy(a.acquire(1)), (COPY,), r"\[copy\] expected 2 arguments, got 1"),
        (lambda a, c, copy: copy(a.acquire(1), 3), (COPY,), r"\[copy\] argument 1: expected 64xi32, got 3"),
        (
            lambda a, c, copy: copy(a.acquire(1), c.acquire(1)),
            (Kernel("copy", "copy.cc", [KIND, tensor(32)]),),
            r"\[copy\] argument 1: expected 32xi32, got 64xi32",
        ),
        (lambda a, c: a.acquire(2)[2], (), "expected an index in 0..1 of the objects held, got 2"),
        (lambda a, c: a.fill(None), (), "fill is for the producer's end"),
        (lambda a, c: c.fill(None), (), "fill is for the function given to Runtime"),
        (branch, (), "is not known before the core runs"),
        (lambda a, c: a.acquire(1)[0], (), r"do not read or write the elements of an object \(64xi32\)"),
        (lambda a, c: c.acquire(1).__setitem__(0, 1), (), "do not read or write the elements of an object"),
        (lambda a, c: a.acquire(1) + c.acquire(1), (), "do not read or write the elements of an object"),
        (lambda a, c: list(c.acquire(1)), (), "do not read or write the elements of an object"),
        (lambda a, c, f: f(3.0), (WITH_INTEGER,), r"integers only: give a kernel the bits .*, got 3.0"),
        (lambda a, c, f: f(np.float32(3)), (WITH_INTEGER,), "integers only"),
        (lambda a, c, f: f(3), (WITH_FLOAT,), r"\[scaled\] argument 0: .* integers only: .*, got a f32"),
    ],
)
def test_unsupported_cores_are_refused(core, arguments, message):
    with pytest.raises(RecordingError, match=message):
        one_core(core, *arguments)


def test_loop_left_by_break_is_refused():
    # Python closes the generator when the loop is left, so the recorder never reaches the loop's end.
    with pytest.raises(RecordingError, match="left by break or return"):
        one_core(break_out)


@pytest.mark.parametrize(
    ("sequence", "message"),
    [
        (lambda x, z, a, c: a.acquire(1), "acquire is for a core's function"),
        (lambda x, z, a, c: a.drain(z), "drain is for a consumer's end"),
        (lambda x, z, a, c: a.fill(3), "expected a buffer of the sequence, got 3"),
        (lambda x, z, a, c: a.fill(x, packet=(0, 1)), r"\[fill\] a plan does not hold packet"),
        (lambda x, z, a, c: [None for _ in range_(3)], "a sequence uses Python's range"),
        (lambda x, z, a, c: COPY(x), "expected to be called in a core's function"),
    ],
)
def test_unsupported_sequences_are_refused(sequence, message):
    with pytest.raises(RecordingError, match=message):
        one_core(idle, sequence=sequence)


def test_float_parameter_is_refused():
    """Python would cut the number to an integer without a message."""
    buffer = Buffer(tensor(16), name="parameters", use_write_rtp=True)

    def sequence(x, z, a, c, parameters):
        parameters[0] = 3.7

    with pytest.raises(RecordingError, match=r"writes integers to it, got 3.7: of a float give the bits"):
        Program(NPU2(), Runtime(sequence, [KIND, KIND, None, None, buffer])).resolve_program()


def test_options_at_defaults_are_accepted():
    fifo = ObjectFifo(KIND, plio=False, pad_value=0, init_values=None, packet=False)
    assert fifo.cons().forward(plio=False, pad_value=0).depth == 2


def test_unknown_name_is_refused():
    with pytest.raises(ImportError, match="cannot import name 'Worcker'"):
        from flownpu.aie.iron.compat import Worcker  # noqa: F401


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ObjectFifo(KIND, depth=0), "depth of 1 or more"),
        (lambda: ObjectFifo(KIND).cons(depth=0), "a depth of 1 or more for the fifo or its end, got 0"),
        (lambda: ObjectFifo(KIND, packet=True), r"\[ObjectFifo\] a plan does not hold packet"),
        (lambda: ObjectFifo(KIND, to_stream=TensorAccessPattern([8], 1, [4], [1])), "starts at its beginning"),
        (lambda: ObjectFifo(KIND).cons().join([0]), "join is for the producer's end"),
        (lambda: ObjectFifo(KIND).prod().split([0]), "split is for a consumer's end"),
        (lambda: ObjectFifo(KIND).cons().split([0, 8], obj_types=[KIND]), "lists of 2 entries"),
        (lambda: Worker(idle, [ObjectFifo(KIND)]), "expected the ends of a fifo"),
        (lambda: Worker(idle, [], trace=1), r"\[Worker\] a plan does not hold trace"),
        (lambda: ObjectFifo(KIND, aie_stream=0), r"\[ObjectFifo\] a plan does not hold aie_stream"),
        (lambda: ObjectFifo(KIND, init_values=[], packet_id=0), r"a plan does not hold init_values, packet_id"),
        (lambda: Buffer(KIND, address=0), r"\[Buffer\] a plan does not hold address"),
        (lambda: Worker(idle, [], data_size=0), r"\[Worker\] a plan does not hold data_size"),
        (lambda: ObjectFifo(KIND, pad_value=1), r"\[ObjectFifo\] a plan does not hold pad_value"),
        (lambda: ObjectFifo(KIND).prod(channel=0), r"\[ObjectFifo.prod\] a plan does not hold channel"),
        (lambda: ObjectFifo(KIND, repeat_count=2), r"\[ObjectFifo\] a plan does not hold repeat_count"),
        (lambda: ObjectFifo(KIND).cons().forward(depth=0), "a depth of 1 or more, got 0"),
        (Buffer, "expected a type, an initial value or both"),
        (lambda: Buffer(KIND, address=64), r"\[Buffer\] a plan does not hold address"),
        (lambda: Runtime(idle, [np.int32]), "give a number rather than the type"),
        (lambda: ObjectFifo(np.ndarray[(4,), np.dtype[np.complex64]]), "no DMA or kernel of ours uses elements of"),
    ],
)
def test_unfit_options_are_refused(make, message):
    with pytest.raises(RecordingError, match=message):
        make()


def test_fifo_end_used_twice_is_refused():
    a = ObjectFifo(KIND, name="a")
    end = a.cons()
    Worker(idle, [end])
    with pytest.raises(RecordingError, match=r"\[ObjectFifo a\] its consume end is already in use"):
        Worker(idle, [end])


def test_fifo_without_consumer_is_refused():
    a = ObjectFifo(KIND, name="a")
    runtime = Runtime(lambda x, a: a.fill(x), [KIND, a.prod()])
    with pytest.raises(RecordingError, match=r"\[ObjectFifo a\] has no consumer"):
        Program(NPU2(), runtime, []).resolve_program()
