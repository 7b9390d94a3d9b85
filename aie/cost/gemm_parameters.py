# SPDX-License-Identifier: Apache-2.0
"""What the model of a GEMM takes from outside, of each generation: rates, bandwidths, costs of a call.

A fitted parameter is fitted to published rows by `python -m flownpu.aie.cost.fit_gemm`, which prints them; a test
compares. Each has one value for all precisions, sizes and tiles.
"""

from __future__ import annotations

from dataclasses import dataclass

from flownpu.aie.cost.parameters import Parameter

__all__ = ["GEMM", "GemmParameters", "gemm_parameters"]

_BALANCE = "arXiv 2512.13282"
_READ = "2026-11"
_DISPATCH = "amd/IRON decode_costs_npu2.json: 44 to 50 us (XDNA2; taken for both)"
_AM020 = "AMD AM020: multiply-adds a cycle; streams of 32 bits"


@dataclass(frozen=True)
class GemmParameters:
    """One generation's; cycles are of its clock.

    Attributes:
        target: npu1 or npu2.
        clock: of the array.
        stream: what a stream carries.
        core_input: what an input of a compute tile takes, in the single-core programme (equations 2 and 3).
        macs: multiply-adds a cycle of the inner loop, by what is multiplied.
        element: for each element of C in each call: filling and draining the pipelined loop.
        call: for each call: locks, counters, call and return.
        accumulator_byte: for each byte of C in each call: loading and storing the partial sums.
        epilogue: for each element of C that is stored, besides its way through registers.
        read: from main memory, all streams together, in long runs.
        run: a run of neighbouring bytes takes a stream no less where the next one lies on another page of memory (A; B
            column-major).
        neighbour_run: the same where the other columns read what lies beside it at the same time (B row-major).
        dispatch: a call, wall clock.
        synchronise: waiting for a task and writing the next one's descriptors, where nothing else goes on meanwhile.
    """

    target: str
    clock: Parameter
    stream: Parameter
    core_input: Parameter
    macs: dict[str, Parameter]
    call: Parameter
    element: Parameter
    accumulator_byte: Parameter
    epilogue: dict[str, Parameter]
    read: Parameter
    run: Parameter
    neighbour_run: Parameter
    dispatch: Parameter
    synchronise: Parameter


def _stated(value: float, unit: str, source: str) -> Parameter:
    return Parameter(value, unit, source, _READ)


def _fitted(value: float, unit: str, rows: str) -> Parameter:
    return Parameter(value, unit, _BALANCE, _READ, rows)


def _epilogues(factor: int) -> dict[str, Parameter]:
    """Per element; `factor`: how many times as long as on XDNA2."""
    suffix = "" if factor == 1 else "; XDNA's vectors have half the width"
    gelu = _stated(factor * 318 / 1024, "cycles", f"mlir-aie levers.md: gelu of 1024 elements in 318 cycles{suffix}")
    gated = _stated(factor * 856 / 1024, "cycles", f"mlir-aie levers.md: swiglu of 1024 elements in 856 cycles{suffix}")
    return {"gelu": gelu, "geglu": gated, "swiglu": gated}


_THROUGHPUT = "throughput of a core, tables 1 to 3"
_RUNS = "sections 5.2.1 and 5.2.2, both generations"
_COLUMN_OVER_ROW = "section 5.2.3: B column-major over row-major"
_CALL = "TOPS of tables 2 and 3, both generations"
_SYNCHRONISED = "section 5.3.3, both generations"

GEMM: dict[str, GemmParameters] = {
    "npu1": GemmParameters(
        target="npu1",
        clock=_stated(1.0e9, "Hz", f"{_BALANCE}, section 5.2.1; the driver's table goes to 1.6 GHz"),
        stream=_stated(4, "bytes/cycle", _AM020),
        core_input=_stated(4, "bytes/cycle", _AM020),
        macs={"int8": _stated(256, "1/cycle", _AM020), "bf16": _stated(128, "1/cycle", _AM020)},
        call=_fitted(72.8, "cycles", _CALL),
        element=_fitted(0.0156, "cycles", _THROUGHPUT),
        accumulator_byte=_fitted(0.0647, "cycles", _THROUGHPUT),
        epilogue=_epilogues(2),
        read=_fitted(19.1e9, "bytes/s", "table 2, section 5.2.1"),
        run=_fitted(117.0, "cycles", _RUNS),
        neighbour_run=_fitted(34.3, "cycles", _COLUMN_OVER_ROW),
        dispatch=_stated(50e-6, "s", _DISPATCH),
        synchronise=_fitted(48.5e3, "cycles", _SYNCHRONISED),
    ),
    "npu2": GemmParameters(
        target="npu2",
        clock=_stated(1.8e9, "Hz", f"{_BALANCE}, section 5.2.1"),
        stream=_stated(4, "bytes/cycle", _AM020),
        core_input=_stated(8, "bytes/cycle", f"{_BALANCE}: the least with which table 1's kernels satisfy equation 4"),
        macs={
            "int8": _stated(512, "1/cycle", _AM020),
            "bf16": _fitted(180.4, "1/cycle", f"{_THROUGHPUT}; both operands become bfp16 in registers"),
            "bfp16": _stated(410, "1/cycle", "mlir-aie levers.md: 64 x 64 x 64 in 951 cycles, less what C takes"),
        },
        call=_fitted(72.8, "cycles", _CALL),
        element=_fitted(0.0478, "cycles", _THROUGHPUT),
        accumulator_byte=_fitted(0.0249, "cycles", _THROUGHPUT),
        epilogue=_epilogues(1),
        read=_fitted(66.3e9, "bytes/s", "table 3, section 5.2.1"),
        run=_fitted(117.0, "cycles", _RUNS),
        neighbour_run=_fitted(55.5, "cycles", _COLUMN_OVER_ROW),
        dispatch=_stated(50e-6, "s", _DISPATCH),
        synchronise=_fitted(48.5e3, "cycles", _SYNCHRONISED),
    ),
}


def gemm_parameters(target: str) -> GemmParameters:
    """The parameters of a generation.

    Raises:
        ValueError: there is no such target.
    """
    if target not in GEMM:
        raise ValueError(f"[gemm cost] expected a target of {', '.join(GEMM)}, got {target!r}")
    return GEMM[target]
