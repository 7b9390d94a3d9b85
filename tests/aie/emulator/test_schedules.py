# SPDX-License-Identifier: Apache-2.0
"""Whatever the order of events, results are the same; if a program has a race, some schedule shows it."""

import dataclasses

import numpy as np
import pytest

from flownpu.aie.designs.dequant_engine import DequantEngine
from flownpu.aie.designs.flow_kv import FlowKV
from flownpu.aie.designs.flow_qkv import FlowQKV
from flownpu.aie.designs.fused_dqp import FusedDQP
from flownpu.aie.designs.gemm import Gemm
from flownpu.aie.designs.norm_rope import NormRope
from flownpu.aie.designs.patch_pooling import PatchPooling
from flownpu.aie.designs.vector_operators import ResidualRMSNorm, RMSNorm, RotaryEmbedding, Softmax
from flownpu.aie.plan.data import Await, Free, Release, SetBarrier, Transfer, WriteParameter
from tests.aie.designs.cases import (
    dequant_engine_case,
    flow_kv_case,
    flow_qkv_case,
    fused_dqp_case,
    gated_activation_case,
    gated_gemm_case,
    gemm_case,
    norm_rope_case,
    patch_pooling_case,
    residual_rms_norm_case,
    rms_norm_case,
    rotary_embedding_case,
    softmax_case,
)
from tests.aie.emulation import emulate, emulator
from tests.aie.small_programs import chain, split_and_join, with_body, with_steps

SMALL = {"m": 16, "n": 32, "k": 16, "k_mt": 32}  # a GEMM's tiles
CASES = {
    "fused_dqp": lambda rng: fused_dqp_case(FusedDQP("npu2", 512), 1056, 300, rng),
    "fused_dqp of npu1": lambda rng: fused_dqp_case(FusedDQP("npu1", 512, 16), 544, 300, rng),
    "fused_dqp with geglu": lambda rng: fused_dqp_case(FusedDQP("npu2", 256, 32, "geglu"), 544, 256, rng),
    "dequant_engine": lambda rng: dequant_engine_case(DequantEngine("npu2"), 192, 300, rng),
    "dequant_engine, woven": lambda rng: dequant_engine_case(DequantEngine("npu2", "bfp16"), 192, 300, rng, gated=True),
    "gemm": lambda rng: gemm_case(Gemm("npu2", "bfp16", **SMALL), 70, 64, 288, rng),
    "gemm of npu1": lambda rng: gemm_case(Gemm("npu1", **SMALL), 70, 64, 160, rng),
    "gemm in megatiles": lambda rng: gemm_case(Gemm("npu2", e_y=2, e_x=2, **SMALL), 130, 64, 512, rng),
    "gemm with swiglu": lambda rng: gated_gemm_case(Gemm("npu2", "bf16", "swiglu", **SMALL), 17, 64, 256, rng),
    "gemm without its swiglu": lambda rng: gemm_case(
        Gemm("npu2", "bfp16", "swiglu", e_y=2, **SMALL), 130, 64, 544, rng, plain=True
    ),
    "flow_kv": lambda rng: flow_kv_case(FlowKV("npu2", 8, 4, 64), 100, 128, rng),
    "flow_kv-swa": lambda rng: flow_kv_case(FlowKV("npu1", 8, 2, 64), 100, 128, rng, window=40),
    "flow_qkv": lambda rng: flow_qkv_case(FlowQKV("npu2", 4, 2, 64), 70, 30, 128, rng),
    "flow_qkv-swa": lambda rng: flow_qkv_case(FlowQKV("npu1", 4, 2, 64), 40, 64, 128, rng, window=20),
    "flow_qkv-nca": lambda rng: flow_qkv_case(FlowQKV("npu2", 2, 2, 72), 70, 0, 128, rng, causal=False),
    "flow_qkv of a block": lambda rng: flow_qkv_case(
        FlowQKV("npu2", 4, 2, 64), 96, 40, 160, rng, window=50, block=True
    ),
    "rms_norm": lambda rng: rms_norm_case(RMSNorm("npu2", 96, 4), 17, rng),
    "residual rms_norm": lambda rng: residual_rms_norm_case(ResidualRMSNorm("npu2", 96, False, 3), 17, rng),
    "residual rms_norm, norm first": lambda rng: residual_rms_norm_case(ResidualRMSNorm("npu2", 96, True, 3), 17, rng),
    "softmax": lambda rng: softmax_case(Softmax("npu2", 64, 3), 17, 49, rng),
    "rope": lambda rng: rotary_embedding_case(RotaryEmbedding("npu2", 5, 64, cores=4), 17, rng),
    "norm_rope": lambda rng: norm_rope_case(NormRope("npu2", 4, 2, 64, True, 4), 17, 40, rng),
    "geglu": lambda rng: gated_activation_case("npu1", "geglu", 256 * 17, rng, cores=4),
    "patch_pooling": lambda rng: patch_pooling_case(PatchPooling("npu2", 48, 2, 3), 14, rng),
}


@pytest.mark.parametrize("design", CASES)
def test_hundred_schedules_equal_reference(rng, design):
    """Each runs on the array as the one before left it."""
    CASES[design](rng).fuzz(range(1, 101))


def order(seed):
    """The order in which four cores that share a stream call their kernels."""
    calls = []

    def add(x, y, number):
        calls.append(number)
        np.add(x, number, out=y)

    emulate(split_and_join(4), functions={"add": add}, seed=seed, x=np.arange(12 * 64, dtype=np.int32))
    return tuple(calls)


def test_schedules_differ_and_repeat():
    orders = [order(seed) for seed in range(20)]
    assert orders == [order(seed) for seed in range(20)]
    assert len(set(orders)) > 10
    assert any(late[-3:] == (0, 0, 0) for late in map(order, range(1, 200, 2))), "a core that is long not scheduled"


# --- Races ------------------------------------------------------------------------------------------------------------


def results(plan, seeds, **inputs):
    """The result of each schedule: the output's bytes, or the beginning of the error's message."""
    found = []
    for seed in seeds:
        try:
            found.append(
                emulate(plan, functions={"scale": scale}, checked=False, seed=seed, **inputs)["target"].tobytes()
            )
        except (RuntimeError, AssertionError) as error:
            found.append(str(error)[:60])
    return found


def scale(x, y, factor):
    y[:] = x * factor


SOURCE = np.arange(1, 257, dtype=np.int32)


def test_parameter_written_while_core_runs_changes_results():
    """After its start the core reads how many objects there are: before or after the change, by chance."""
    plan = chain()
    steps = list(plan.sequence.steps)
    after = next(place for place, step in enumerate(steps) if isinstance(step, SetBarrier)) + 1
    changed = dataclasses.replace(next(s for s in steps if isinstance(s, WriteParameter)), value=3)
    found = results(with_steps(plan, *steps[:after], changed, *steps[after:]), range(50), source=SOURCE)
    assert (3 * SOURCE).tobytes() in found
    assert any(isinstance(text, str) and "deadlock" in text for text in found)


def test_lost_start_is_found():
    """The barrier is set again before the core has finished its first pass: in some schedules it makes only one."""
    plan = chain(2)
    start = [s for s in plan.sequence.steps if isinstance(s, (WriteParameter, SetBarrier))]
    moves = [s for s in plan.sequence.steps if isinstance(s, Transfer)]
    ends = [s for s in plan.sequence.steps if isinstance(s, (Await, Free))]
    halves = [dataclasses.replace(s, tap=dataclasses.replace(s.tap, walk=s.tap.walk)) for s in moves]
    again = [dataclasses.replace(s, name=f"{s.name}_again") for s in halves]
    last = [dataclasses.replace(s, transfer=f"{s.transfer}_again") for s in ends]
    source = np.arange(1, 129, dtype=np.int32)
    waits = with_steps(plan, *start, *moves, *ends, *start, *again, *last)
    assert set(results(waits, range(50), source=source)) == {(3 * source).tobytes()}
    hurries = with_steps(plan, *start, *start, *moves, *again, *ends, *last)
    found = results(hurries, range(50), source=source)
    assert any(isinstance(text, str) and "deadlock" in text for text in found)


def test_output_read_before_await_is_found():
    """The call's second half reads what its first half writes; without a wait, some schedules read what was there."""
    plan = chain(2)
    fill, drain = (s for s in plan.sequence.steps if isinstance(s, Transfer))
    start = [s for s in plan.sequence.steps if isinstance(s, (WriteParameter, SetBarrier))]
    again = dataclasses.replace(fill, name="again", buffer="target"), dataclasses.replace(drain, name="back")
    ends = [Await(drain.name), Await("back"), Free(fill.name), Free("again")]
    source = np.arange(1, 129, dtype=np.int32)
    waits = with_steps(plan, *start, fill, drain, Await(drain.name), *start, *again, *ends[1:])
    assert set(results(waits, range(50), source=source)) == {(9 * source).tobytes()}
    start = [dataclasses.replace(s, value=4) if isinstance(s, WriteParameter) else s for s in start]
    found = results(with_steps(plan, *start, fill, drain, *again, *ends), range(50), source=source)
    assert len(set(found)) > 1


def test_object_released_before_read_is_found():
    def release_first(body):
        release = next(s for s in body if isinstance(s, Release) and s.port == "consume")
        call_first = [s for s in body if s is not release]
        return [*call_first[:2], release, *call_first[2:]]

    found = results(with_body(chain(), release_first), range(5), source=SOURCE)
    assert all(bytes_found != (3 * SOURCE).tobytes() for bytes_found in found)


# --- Calls that follow each other at once -----------------------------------------------------------------------------


def wrong_schedules(cases, seeds, *, settle):
    """The schedules under which calls in a row go wrong."""
    wrong = []
    for seed in seeds:
        array = emulator(cases[0].plan.array)
        try:
            for case in cases:
                case.check(array, seed=seed, settle=settle)
        except (RuntimeError, AssertionError):
            wrong.append(seed)
    return wrong


IDLE = {  # calls that leave some cores without work, and between them calls that do not
    "fused_dqp": lambda rng: [fused_dqp_case(FusedDQP("npu2", 512), m, 300, rng) for m in (128, 1056, 128, 1056)],
    "rms_norm": lambda rng: [rms_norm_case(RMSNorm("npu2", 96, 4), rows, rng) for rows in (1, 9, 2, 9)],
    "residual rms_norm": lambda rng: [
        residual_rms_norm_case(ResidualRMSNorm("npu2", 96, False, 4), rows, rng) for rows in (1, 9, 2, 9)
    ],
    "softmax": lambda rng: [softmax_case(Softmax("npu2", 64, 4), rows, 49, rng) for rows in (1, 9, 2, 9)],
    "patch_pooling": lambda rng: [patch_pooling_case(PatchPooling("npu2", 48, 2, 4), grid, rng) for grid in (2, 14, 4)],
    "norm_rope": lambda rng: [
        norm_rope_case(NormRope("npu2", 4, 2, 64, True, 4), tokens, 7, rng) for tokens in (1, 9, 2, 9)
    ],
    "flow_qkv": lambda rng: [
        flow_qkv_case(FlowQKV("npu2", 2, 2, 64), tokens, 0, 256, rng) for tokens in (5, 130, 17, 130)
    ],
    "flow_kv": lambda rng: [flow_kv_case(FlowKV("npu2", 4, 2, 64), total, 128, rng) for total in (1, 100, 17, 100)],
    "gemm": lambda rng: [gemm_case(Gemm("npu2", **SMALL), m, 64, 288, rng) for m in (1, 70, 17, 70)],
}


@pytest.mark.parametrize("design", IDLE)
def test_calls_need_no_time_between_them(rng, design):
    """A core without work may be late: it must not take the start of the next call for that of its own."""
    assert wrong_schedules(IDLE[design](rng), range(30), settle=False) == []


@pytest.mark.parametrize("design", ["fused_dqp", "rms_norm"])
def test_early_parameter_write_is_found(rng, design):
    """If they do not wait for what all cores share, a core that was idle in the call before misses its start."""

    def early(plan):
        first = [s for s in plan.sequence.steps if isinstance(s, (WriteParameter, SetBarrier))]
        return with_steps(plan, *first, *(s for s in plan.sequence.steps if s not in first))

    cases = [dataclasses.replace(case, plan=early(case.plan)) for case in IDLE[design](rng)]
    assert wrong_schedules(cases, range(30), settle=True) == []
    assert wrong_schedules(cases, range(30), settle=False) != []
