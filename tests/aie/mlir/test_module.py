# SPDX-License-Identifier: Apache-2.0
"""The printed MLIR: mlir-opt parses it, and it says what the plan says.

mlir-opt (`make test` gets Debian's, by scripts/mlir_opt.py) does not know the AIE dialects: it checks syntax, that
every value is defined with the type it is used with, and the operations of the dialects it knows (scf, arith, memref).
The pass order of a real aie-opt is tried outside of CI (docs/npu-designs.md).
"""

import re
import subprocess
from collections import Counter

import pytest

from flownpu.aie.mlir.module import to_mlir
from flownpu.aie.plan.data import (
    Acquire,
    Await,
    Call,
    Dimension,
    Free,
    Loop,
    Operation,
    Release,
    SetBarrier,
    Tap,
    Transfer,
    Variable,
    WriteParameter,
)
from scripts import mlir_opt
from tests.aie.designs.test_plans import ALL, plan_of
from tests.aie.small_programs import chain, with_body, with_end, with_step

OPT = mlir_opt.find()
needs_mlir_opt = pytest.mark.skipif(OPT is None, reason=mlir_opt.reason())


def opt(text):
    # mlir-opt cannot look up a call's function through aie.core and aie.device, operations that it does not know.
    text = text.replace('"func.call"', '"kernel.call"')
    command = [OPT, "--allow-unregistered-dialect", "--mlir-print-op-generic"]
    return subprocess.run(command, input=text, capture_output=True, text=True, check=False)


@needs_mlir_opt
@pytest.mark.parametrize("design", ALL)
def test_mlir_opt_parses_every_design(design):
    done = opt(to_mlir(plan_of(ALL[design]())))
    assert (done.returncode, done.stderr) == (0, "")


@needs_mlir_opt
def test_mlir_opt_sees_wrong_type():
    """Parsing checks something: a call with an object of another size does not pass."""
    text = to_mlir(chain()).replace(
        "(memref<64xi32>, memref<64xi32>, i32) -> ()\n", "(memref<65xi32>, memref<64xi32>, i32) -> ()\n"
    )
    assert "expects different type" in opt(text).stderr


def called(array):
    """The kernels that some core calls. A real aie-opt warns of others, as it does not link their objects."""
    body = (statement for core in array.cores for statement in core.statements)
    return {statement.kernel for statement in body if isinstance(statement, Call)}


@pytest.mark.parametrize("design", ALL)
def test_plan_parts_are_printed_once(design):
    plan = plan_of(ALL[design]())
    text = to_mlir(plan)
    printed = Counter(re.findall(r'"((?:aie|aiex|func|scf)\.[\w.]+)"', text))
    array = plan.array
    body = [statement for core in array.cores for statement in core.statements]
    steps = Counter(type(step) for step in plan.sequence.steps)
    expected = {
        "aie.device": 1,
        "aie.objectfifo": len(array.fifos),
        "aie.objectfifo.link": len(array.links),
        "aie.core": len(array.cores),
        "aie.buffer": len(array.buffers),
        "aie.lock": len(array.barriers),
        "func.func": len(array.kernels),
        "func.call": sum(isinstance(s, Call) for s in body),
        "scf.for": sum(isinstance(s, Loop) for s in body) + sum(core.forever for core in array.cores),
        "aie.objectfifo.acquire": sum(isinstance(s, Acquire) for s in body),
        "aie.objectfifo.release": sum(isinstance(s, Release) for s in body),
        "aie.runtime_sequence": 1,
        "aiex.dma_configure_task_for": steps[Transfer],
        "aiex.dma_start_task": steps[Transfer],
        "aiex.dma_await_task": steps[Await],
        "aiex.dma_free_task": steps[Free],
        "aiex.npu.rtp_write": steps[WriteParameter],
        "aiex.set_lock": steps[SetBarrier],
    }
    assert {name: printed[name] for name in expected} == expected
    assert called(array) == {kernel.entry for kernel in array.kernels}


def test_lines_as_real_aie_opt_prints_them():
    """Against text printed by a real aie-opt: an object fifo, a forward link, an acquire, a parameter."""
    text = to_mlir(chain())
    assert (
        '"aie.objectfifo"(%tile_0_0, %tile_0_1) <{'
        "dimensionsFromStreamPerConsumer = #aie<bd_dim_layout_array_array[[]]>, "
        "dimensionsToStream = #aie<bd_dim_layout_array[]>, disable_synchronization = false, "
        "elemNumber = [2 : i32, 2 : i32], elemType = !aie.objectfifo<memref<64xi32>>, plio = false, "
        'sym_name = "a", via_DMA = false}> : (index, index) -> ()'
    ) in text
    assert (
        '"aie.objectfifo.link"() <{dst_offsets = [], fifoIns = [@a], fifoOuts = [@b], src_offsets = []}> : () -> ()'
        in text
    )
    assert (
        "<{objFifo_name = @b, port = 1 : i32, size = 1 : i32}> : () -> !aie.objectfifosubview<memref<64xi32>>" in text
    )
    assert '"aiex.npu.rtp_write"() <{buffer = @parameters, index = 0 : ui32, value = 4 : i32}> : () -> ()' in text


def bd(plan):
    """The attributes of the first transfer's task and of its descriptor."""
    text = to_mlir(plan)
    task = re.search(r'"aiex.dma_configure_task_for"\(\) <\{(.*?)\}>', text)
    descriptor = re.search(r'"aie.dma_bd"\(%arg0\) <\{(.*?)\}>', text)
    return task.group(1), descriptor.group(1)


def test_contiguous_run_has_no_dimensions():
    task, descriptor = bd(chain())
    assert "repeat_count" not in task
    assert descriptor == "burst_length = 0 : i32, len = 256 : i32, offset = 0 : i32"


def test_repetitions_are_tasks():
    """Without a repeat count only the first repetition is queued; a real aie-opt accepts that."""
    task, descriptor = bd(
        with_step(chain(), Transfer, tap=Tap(0, (Dimension(4, 0), Dimension(4, 16), Dimension(16, 1))))
    )
    assert "repeat_count = 3 : i32" in task
    assert "len = 64 : i32" in descriptor, "the length of one repetition"
    assert (
        "dimensions = #aie<bd_dim_layout_array[<size = 4, stride = 0>, <size = 1, stride = 0>, "
        "<size = 4, stride = 16>, <size = 16, stride = 1>]>"
    ) in descriptor


def test_negative_words_and_walks():
    text = to_mlir(with_step(chain(), WriteParameter, value=(1 << 32) - 2))
    assert "value = -2 : i32" in text
    text = to_mlir(with_end(chain(), "b", "produce", walk=(Dimension(8, 1), Dimension(8, 8))))
    assert "dimensionsToStream = #aie<bd_dim_layout_array[<size = 8, stride = 1>, <size = 8, stride = 8>]>" in text


@needs_mlir_opt
def test_index_arithmetic_is_typed():
    plan = chain()
    loop = next(s for s in plan.array.cores[0].body if isinstance(s, Loop))
    index = Variable(loop.variable)
    value = Operation("-", Operation("%", Operation("//", Operation("*", index, 3), 2), 5), Operation("+", index, 1))

    def change(body):
        return [Call(s.kernel, (*s.arguments[:2], value)) if isinstance(s, Call) else s for s in body]

    done = opt(to_mlir(with_body(plan, change)))
    assert (done.returncode, done.stderr) == (0, "")
    for operation in ("muli", "floordivsi", "remsi", "subi", "addi", "index_cast"):
        assert f'"arith.{operation}"' in done.stdout
