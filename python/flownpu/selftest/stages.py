# SPDX-License-Identifier: Apache-2.0
"""The stages of the self-test before those of a decoder (decoder.py): a copy, each kernel, each design.

A stage called "NAME, more" is the stage NAME with more work; measures.py derives parameters from the difference of
their times. On an NPU it has enough work for its time to stand out from a dispatch's 50 us; on the emulator, whose
times mean nothing, it has only a little.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from flownpu.aie.designs.common import limits_of
from flownpu.aie.designs.copy import Copy
from flownpu.aie.designs.dequant_engine import DequantEngine
from flownpu.aie.designs.flow_kv import FlowKV
from flownpu.aie.designs.flow_qkv import FlowQKV
from flownpu.aie.designs.fused_dqp import FusedDQP
from flownpu.aie.designs.gated_delta import GatedDelta
from flownpu.aie.designs.gemm import Gemm
from flownpu.aie.designs.one_tile import KERNELS, ROW, OneTile
from flownpu.aie.designs.patch_pooling import PatchPooling
from flownpu.aie.designs.vector_operators import ResidualRMSNorm, RMSNorm
from flownpu.aie.programs.alone import program_of
from flownpu.selftest.decoder import decoder_stages
from flownpu.selftest.reference import attention, projections, rows
from flownpu.selftest.reference.gated_delta import gated_delta_cases
from flownpu.selftest.stage import Stage, Trial, call_of_case, check_of_case, inputs_of_case, trial_of_cases

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from flownpu.selftest.reference.case import Case

    Rng = np.random.Generator
    # Cases of one call: one for each output that is compared.
    _Cases = Callable[[Rng], "list[Case]"]

_CHANGES = 16  # changes of array in the stage `arrays in turn`


@dataclass(frozen=True)
class _Sizes:
    """Work of the "more" stages: rows copied, rows read, calls of a kernel, keys before a prompt, a GEMM's m, k, n."""

    copied: int
    read: int
    calls: int
    past: int
    gemm: tuple[int, int, int]


# At the rates of aie/cost/parameters.py, 4096 rows of 2 KB take 1.6 ms on one stream; 2048 rows of two streams, 16 MB,
# 0.25 ms of main memory; 2000 calls of the shortest kernel, a vector's with 0.2 cycles per element, 0.2 ms; 2048 keys
# for 128 tokens 0.2 ms, and the GEMM 0.3 ms.
_MANY = _Sizes(4096, 2048, 2001, 2048, (1024, 2048, 1024))
_FEW = _Sizes(256, 128, 5, 128, (256, 512, 1024))


def selftest_stages(target: str, *, many: bool) -> list[Stage]:
    """All stages for a target, the simplest first.

    Args:
        target: npu1 or npu2.
        many: whether the "more" stages have enough work to be timed.

    Raises:
        ValueError: there is no such target.
    """
    limits_of(target)
    return list(_Stages(target, _MANY if many else _FEW).stages())


@dataclass(frozen=True)
class _Stages:
    target: str
    sizes: _Sizes

    def stages(self) -> Iterator[Stage]:
        yield from self._copies()
        yield from self._kernels()
        yield from self._rows()
        yield from self._projections()
        yield from self._attention()
        yield from decoder_stages(self.target)

    @property
    def _columns(self) -> int:
        return limits_of(self.target).columns

    @property
    def _weights(self) -> tuple[str, ...]:
        return ("bf16",) if self.target == "npu1" else ("bf16", "bfp16")

    # --- Copies -------------------------------------------------------------------------------------------------------

    def _copies(self) -> Iterator[Stage]:
        """Copies; their `work` is the bytes that are read."""
        one, all_of_them = Copy(self.target, 1024, 1024), Copy(self.target, 2048, 16, self._columns, 2)
        for name, design, count in (
            ("copy", one, 16),
            ("copy, more", one, self.sizes.copied),
            ("streams", all_of_them, 32),
            ("streams, more", all_of_them, self.sizes.read),
        ):
            group = name.removesuffix(", more")
            cases = partial(rows.copy_cases, design, count)
            yield _stage(
                name, group, cases, work=2 * count * design.n * design.streams, has_result=name == "copy, more"
            )

    # --- Kernels ------------------------------------------------------------------------------------------------------

    def _kernels(self) -> Iterator[Stage]:
        """Kernels on one tile; their `work` is the calls or, if the parameter is per element, the elements."""
        for kernel, operands in KERNELS.items():
            if kernel.endswith("bfp16") and "bfp16" not in self._weights:
                continue
            design = OneTile(self.target, kernel)
            for name, calls in ((f"kernel {kernel}", 1), (f"kernel {kernel}, more", self.sizes.calls)):
                cases = partial(self._alone, design, calls)
                yield _stage(name, f"kernel {kernel}", cases, work=calls * (operands.elements or 1))

    def _alone(self, design: OneTile, calls: int, rng: Rng) -> list[Case]:
        """The case of a kernel on one tile: after any number of equal calls, the result is that of one call."""
        target = self.target
        makers: dict[str, Callable[[], Case]] = {
            "fused_dqp": lambda: projections.fused_dqp_case(FusedDQP(target, 256, 16), 32, 256, rng),
            "rms_norm": lambda: rows.rms_norm_case(RMSNorm(target, ROW), 1, rng),
            "rope": partial(rows.rope_case, design, rng),
        }
        for kind in self._weights:
            for planes, name in ((1, f"q4nx_dequant_{kind}"), (2, f"q4nx_dequant_planes_{kind}")):
                engine = DequantEngine(target, kind, planes)
                makers[name] = partial(projections.dequant_engine_case, engine, 32, 256, rng)
            makers[f"gemm_{kind}"] = partial(projections.gemm_tile_case, design, kind, rng)
        return [replace(makers[design.kernel](), program=partial(design.program, calls))]

    # --- Operators on rows --------------------------------------------------------------------------------------------

    def _rows(self) -> Iterator[Stage]:
        """Kernels with three operands on one tile, then operators on all columns."""
        target, cores = self.target, self._columns

        def both(design: Any, make: Callable[..., Case], count: int, rng: Rng) -> list[Case]:
            seed = int(rng.integers(1 << 32))
            return [make(design, count, np.random.default_rng(seed), output=output) for output in ("s", "y")]

        def one(make: Callable[..., Case], *sizes: Any) -> _Cases:
            return lambda rng: [make(*sizes, rng)]

        residual = rows.residual_rms_norm_case
        for name, cases in (
            ("kernel add_rms_norm", partial(both, ResidualRMSNorm(target, 1024), residual, 3)),
            ("kernel rms_norm_add", one(residual, ResidualRMSNorm(target, 1024, True), 3)),
            ("kernel patch_pooling_norm", one(rows.pooled_norm_case, PatchPooling(target, 1152, cores=1), 4)),
            ("rms_norm", one(rows.rms_norm_case, RMSNorm(target, 1152, cores), 17)),
            ("patch_pooling", one(rows.pooled_norm_case, PatchPooling(target, 1152, cores=cores), 32)),
        ):
            yield _stage(name, name, cases)

    # --- Projections --------------------------------------------------------------------------------------------------

    def _projections(self) -> Iterator[Stage]:
        """Projections; `work` of "gemm bf16" is operations, of "arrays in turn" changes of array."""
        target, (m, k, n) = self.target, self.sizes.gemm
        tiles = 4 * self._columns
        for epilogue in ("none", "geglu", "swiglu"):
            vector = FusedDQP(target, 512, tiles, epilogue)
            make = partial(projections.fused_dqp_case, vector, 1056, 300)
            yield _stage(f"fused_dqp {epilogue}", f"fused_dqp {epilogue}", _alone(make))
        eight_bits = partial(projections.fused_dqp_case, FusedDQP(target, 512, tiles), 1056, 300, bits=8)
        yield _stage("fused_dqp 8 bits", "fused_dqp none", _alone(eight_bits))
        for weights in self._weights:
            group = f"gemm {weights}"
            dequantised = partial(projections.dequant_engine_case, DequantEngine(target, weights), 256, 512)
            yield _stage(f"dequant_engine {weights}", group, _alone(dequantised), array="dequant_engine")
            design = Gemm(target, weights)
            small = partial(projections.gemm_case, design, 17, 256, design.width)
            work = 2 * design.padded(17, 256)[0] * 256 * design.width
            yield _stage(f"gemm {weights}", group, _alone(small), array="gemm", work=work)
            large = partial(projections.gemm_case, design, m, k, n)
            yield _stage(f"gemm {weights}, more", group, _alone(large), array="gemm", work=2 * m * k * n)
            if weights == "bf16":
                yield Stage("arrays in turn", group, partial(_in_turn, dequantised, small), _CHANGES)
        for epilogue in ("gelu", "geglu", "swiglu"):
            fused = Gemm(target, self._weights[-1], epilogue)
            make_case = projections.gemm_case if epilogue == "gelu" else projections.gated_gemm_case
            make = partial(make_case, fused, 17, 300, fused.width)
            yield _stage(f"gemm {epilogue}", f"gemm {epilogue}", _alone(make))

    # --- Attention ----------------------------------------------------------------------------------------------------

    def _attention(self) -> Iterator[Stage]:
        """Attention, and the rule of layers with states; `work` of "nca" (non-causal attention) is multiply-adds."""
        target, columns = self.target, self._columns
        decode = FlowKV(target, 8, 4, 64)
        for name, window in (("flow_kv", None), ("flow_kv window", 40)):
            make = partial(attention.flow_kv_case, decode, 100, 256, window=window)
            yield _stage(name, "flow_kv", _alone(make))
        with_sinks = FlowKV(target, 8, 4, 64, has_sinks=True)
        yield _stage("flow_kv sinks", "flow_kv sinks", _alone(partial(attention.flow_kv_case, with_sinks, 100, 256)))
        prompt = FlowQKV(target, columns, columns, 64)
        for name, window in (("flow_qkv", None), ("flow_qkv window", 40)):
            make = partial(attention.flow_qkv_case, prompt, 17, 100, 128, window=window)
            yield _stage(name, "flow_qkv", _alone(make))
        for name, design in (("flow_qkv nca", prompt), ("flow_qkv nca, d 128", FlowQKV(target, columns, columns, 128))):
            tokens = 4 * design.queries
            for more, past in (("", 0), (", more", self.sizes.past)):
                make = partial(attention.flow_qkv_case, design, tokens, past, past + tokens, causal=False)
                work = 2 * design.heads * design.d * tokens * (past + tokens)
                group = "flow_qkv" if design is prompt else name
                yield _stage(name + more, group, _alone(make), work=work)
        states = GatedDelta(target, 4 * columns, 32, 32)
        yield _stage("gated_delta", "gated_delta", partial(gated_delta_cases, states, 5))


def _alone(make: Callable[..., Case]) -> _Cases:
    return lambda rng: [make(rng=rng)]


def _stage(
    name: str, group: str, cases: _Cases, *, array: str = "", work: float = 0, has_result: bool = False
) -> Stage:
    """A stage of one call."""
    array = re.sub(r"\W+", "-", array or group)

    def make(rng: Rng) -> Trial:
        return trial_of_cases(cases(rng), name, array, has_result=has_result)

    return Stage(name, group, make, work)


def _in_turn(first: Callable[..., Case], second: Callable[..., Case], rng: Rng) -> Trial:
    """Calls of two arrays in turn, so that each call changes the array."""
    cases = {"dequant_engine": first(rng=rng), "gemm": second(rng=rng)}
    pairs = [(case, call_of_case(case, array, f"in turn {array}")) for array, case in cases.items()]
    inputs = {name: content for pair in pairs for name, content in inputs_of_case(*pair).items()}
    program = program_of([call for _, call in pairs] * (_CHANGES // 2), kind="arrays in turn", constants=inputs)
    outputs = tuple(f"{call.name} {case.output}" for case, call in pairs)
    return Trial(program, inputs, outputs, tuple(check_of_case(*pair) for pair in pairs))
