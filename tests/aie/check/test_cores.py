# SPDX-License-Identifier: Apache-2.0
"""Faults of core programs: what is acquired, released and called.

Each rule is broken once; the message names the place, the need and the finding.
"""

import dataclasses

import numpy as np
import pytest

from flownpu.aie.designs.flow_qkv import FlowQKV
from flownpu.aie.iron.compat import NPU2, Buffer, Kernel, ObjectFifo, Program, Runtime, Worker, range_
from flownpu.aie.plan.data import Acquire, BarrierWait, BufferArgument, Call, Element, Load, Release, Type
from flownpu.aie.plan.limits import LIMITS
from tests.aie.check.faults import CHAIN, CORE, messages
from tests.aie.small_programs import tensor, with_array, with_body


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
    "unknown buffer": (with_array(CHAIN, buffers=()), "buffer parameters: need one of the array's buffers, have none"),
    "unknown kernel": (replaced(Call, kernel="other"), "kernel other: need one of the array's kernels, have none"),
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
def test_faulty_core_program_is_refused(case):
    plan, message = CORES[case]
    assert any(message in text for text in messages(plan)), messages(plan)


def window_given_up_one_by_one(dynamic):
    """Hold three objects, then release them in a loop of three passes, or of as many as a parameter says."""
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


def test_object_held_after_loop_pass_is_refused():
    assert messages(window_given_up_one_by_one(False)) == []
    assert (
        "[compute tile (0, 2)] objects of fifo a (consume) held after a pass of a loop: need 1, have 0"
        " (every pass must release what it acquires)"
    ) in messages(window_given_up_one_by_one(True))


def window_that_slides(*, anew, index, dynamic=True):
    """Hold two objects, use and release the older one, then the other: acquired again, or by its index in the view."""
    kind = tensor(64)
    a, c = ObjectFifo(kind, name="a", depth=3), ObjectFifo(kind, name="c")

    def core(a, c, scale):
        both = a.acquire(2)
        out = c.acquire(1)
        scale(both[0], out)
        a.release(1)
        scale(a.acquire(1) if anew else both[index], out)
        a.release(1)
        c.release(1)

    def sequence(x, z, a, c):
        a.fill(x)
        c.drain(z, wait=True)

    scale = Kernel("scale", "scale.o", [kind, kind])
    worker = Worker(core, [a.cons(), c.prod(), scale], dynamic_objfifo_lowering=dynamic)
    return Program(NPU2(), Runtime(sequence, [tensor(128), kind, a.prod(), c.cons()]), [worker]).resolve_program()


def test_object_index_counts_from_oldest_held_object():
    """A dynamic lowering looks up the fifo's place when an object is used; a static one, when it was acquired."""
    assert messages(window_that_slides(anew=True, index=0)) == []
    assert messages(window_that_slides(anew=False, index=1, dynamic=False)) == []
    assert any(
        "for scale: need acquired behind the last release, have before it" in text
        for text in messages(window_that_slides(anew=False, index=1))
    )


def with_stacks(plan, size):
    return with_array(plan, cores=tuple(dataclasses.replace(core, stack_bytes=size) for core in plan.array.cores))


def test_stack_smaller_than_kernels_need_is_refused():
    plan = FlowQKV("npu2", 4, 1, 256).program(512, 0, 512).resolve_program("flow_qkv")
    assert messages(plan) == []
    found = messages(with_stacks(plan, 1024))
    assert len(found) == len(plan.array.cores)
    assert found[0].endswith(
        "stack: need 4096 bytes, have 1024 bytes "
        "(kernels of flow_qkv, by kernels/memory.toml: ask for Worker(stack_size=4096))"
    )


def test_kernels_larger_than_program_memory_are_refused():
    plan = FlowQKV("npu2", 4, 1, 256).program(512, 0, 512).resolve_program("flow_qkv")
    found = messages(plan, dataclasses.replace(LIMITS["npu2"], program_bytes=9216))
    assert len(found) == len(plan.array.cores)
    assert found[0].endswith(
        "program memory: need 10700 bytes, have 9216 bytes (at least, flow_qkv 10700: let two tiles share the kernels)"
    )
