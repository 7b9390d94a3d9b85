# SPDX-License-Identifier: Apache-2.0
"""The printed MLIR: its lines are of the pinned dialect, mlir-opt parses it, and it says what the plan says.

mlir-opt (`make test` gets Debian's, by scripts/mlir_opt.py) does not know the AIE dialects, whose lines are read by
dialect.py: it checks that every value is defined with the type it is used with, and the operations of the dialects it
knows (scf, arith, memref).
"""

import re
import subprocess
from collections import Counter
from dataclasses import replace

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
from scripts import tools
from tests.aie.designs.test_plans import ALL, plan_of
from tests.aie.mlir.dialect import generic_form
from tests.aie.small_programs import chain, with_body, with_end, with_step

OPT = tools.find("mlir-opt")
needs_mlir_opt = pytest.mark.skipif(OPT is None, reason=tools.reason("mlir-opt"))


def opt(text):
    command = [OPT, "--allow-unregistered-dialect", "--mlir-print-op-generic"]
    return subprocess.run(command, input=generic_form(text), capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("now", "before"),
    [
        (
            "%object5 = aie.objectfifo.acquire @b(Consume, 1) : memref<64xi32>",
            "%view5 = aie.objectfifo.acquire @b(Consume, 1) : !aie.objectfifosubview<memref<64xi32>>",
        ),
        (
            "aie.dma_bd(%arg0 : memref<256xi32> offset = 0 len = 256)",
            "aie.dma_bd(%arg0 : memref<256xi32>, 0, 256) {burst_length = 0 : i32}",
        ),
        ("aiex.npu.rtp_write(@parameters, 0, %c1) : i32", "aiex.npu.rtp_write(@parameters, 0, 4)"),
        ("aie.use_lock(%lock1, Acquire, %c6)", "aie.use_lock(%lock1, Acquire, 1)"),
    ],
)
def test_forms_of_earlier_release_are_refused(now, before):
    """Those that changed between March and September 2026."""
    assert generic_form(now)
    with pytest.raises(ValueError, match=r"line 1 has no form of mlir_aie 1\.4\.5's dialect"):
        generic_form(before)


@needs_mlir_opt
@pytest.mark.parametrize("design", ALL)
def test_mlir_opt_parses_every_design(design):
    done = opt(to_mlir(plan_of(ALL[design]())))
    assert (done.returncode, done.stderr) == (0, "")


@needs_mlir_opt
def test_mlir_opt_sees_wrong_type():
    """Parsing finds mistakes: a call with an object of another size does not pass."""
    text = to_mlir(chain()).replace(
        ": (memref<64xi32>, memref<64xi32>, i32)", ": (memref<65xi32>, memref<64xi32>, i32)"
    )
    assert "expects different type" in opt(text).stderr


def called(array):
    """The kernels that some core calls. A real aie-opt warns about others, because it does not link their objects."""
    body = (statement for core in array.cores for statement in core.statements)
    return {statement.kernel for statement in body if isinstance(statement, Call)}


@pytest.mark.parametrize("design", ALL)
def test_plan_parts_are_printed_once_in_forms_of_pinned_dialect(design):
    plan = plan_of(ALL[design]())
    text = to_mlir(plan)
    generic_form(text)  # an error for a line of another form
    printed = Counter(re.findall(r"(?<![!#\w.])((?:aie|aiex|func|scf)\.[\w.]+)", text))
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
        "scf.for": sum(isinstance(s, Loop) for s in body) + len(array.cores),
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


def test_printed_lines_equal_public_tests_of_mlir_aie():
    """An object fifo, a forward link, an acquire, a barrier, a parameter, a core."""
    text = to_mlir(chain())
    for line in (
        "aie.objectfifo @a(%tile_0_0, {%tile_0_1}, [2 : i32, 2 : i32]) : !aie.objectfifo<memref<64xi32>>",
        "aie.objectfifo.link [@a] -> [@b]([] [])",
        " = aie.objectfifo.acquire @b(Consume, 1) : memref<64xi32>",
        "aiex.npu.rtp_write(@parameters, 0, %c",
        "stack_size = 1024 : i32}\n",
    ):
        assert line in text


def test_acquire_of_several_objects_prints_result_for_each():
    plan = with_body(chain(), lambda body: [replace(s, count=2) if isinstance(s, Acquire) else s for s in body])
    acquire = r"%object\d+, %object\d+ = aie.objectfifo.acquire @b\(Consume, 2\) : memref<64xi32>, memref<64xi32>\n"
    assert re.search(acquire, to_mlir(plan))


def bd(plan):
    """The first transfer's descriptor, and the attributes of its task."""
    text = to_mlir(plan)
    return re.search(r"aie\.dma_bd\(%arg0 : memref<256xi32> (.*)\)\n *aie\.end\n *\}(.*)\n", text).groups()


def test_contiguous_run_prints_no_dimensions():
    assert bd(chain()) == ("offset = 0 len = 256", "")


def test_repeated_transfer_prints_repeat_count():
    """Without a repeat count only the first repetition is queued; a real aie-opt accepts that."""
    descriptor, task = bd(
        with_step(chain(), Transfer, tap=Tap(0, (Dimension(4, 0), Dimension(4, 16), Dimension(16, 1))))
    )
    assert task == " {repeat_count = 3 : i32}"
    # The length is that of one repetition.
    assert descriptor == "offset = 0 len = 64 sizes = [4, 1, 4, 16] strides = [0, 0, 16, 1]"


def test_negative_words_and_walks_are_printed():
    text = to_mlir(with_step(chain(), WriteParameter, value=(1 << 32) - 2))
    assert "arith.constant -2 : i32" in text
    text = to_mlir(with_end(chain(), "b", "produce", walk=(Dimension(8, 1), Dimension(8, 8))))
    assert "@b(%tile_0_1 dimensionsToStream [<size = 8, stride = 1>, <size = 8, stride = 8>], {%tile_0_2}, " in text


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
