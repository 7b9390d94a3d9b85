# SPDX-License-Identifier: Apache-2.0
"""The programs of what an NPU computes by itself of a graph: products and attention outside of known layers.

Which nodes these are, and of which sizes, is for the execution provider to say (ops/npu/array_operator.h).
"""

from __future__ import annotations

import contextlib
import math
from typing import TYPE_CHECKING, Any

from flownpu.aie.designs.common import ceil_div
from flownpu.aie.designs.flow_kv import FlowKV
from flownpu.aie.designs.flow_qkv import FlowQKV
from flownpu.aie.programs.operators import buckets, operator_program
from flownpu.onnx_file import load_model, reading

if TYPE_CHECKING:
    from pathlib import Path

    from flownpu.aie.programs.program import Program

__all__ = ["programs_of_graph"]


def programs_of_graph(path: Path, target: str, context: int) -> tuple[list[Program], list[str]]:
    """The programs of a graph's operators, and what was left out, and why.

    Args:
        path: an .onnx file.
        target: npu1 or npu2.
        context: keys that attention has room for, rounded up to its chunks.

    Raises:
        FlowNPUError: it is no ONNX model, or its graph is damaged.
        MissingDependencyError: onnx_ir is not installed.
    """
    model = load_model(path, purpose="flownpu build MODEL")
    with reading(path):
        from flownpu.graph_rewrites.native_graph import describe_operators  # noqa: PLC0415 needs the extra "convert"

        found, left_out = describe_operators(model)
    programs: list[Program] = []
    different = {(kind, tuple(sorted(sizes.items()))): sizes for kind, sizes in found}
    for (kind, _), sizes in different.items():
        for rows in buckets(kind):
            try:
                room = _rounded(context, sizes, target) if "num_heads" in sizes else 0
                if not room or rows <= room:
                    programs.append(operator_program(kind, sizes, target, rows, room))
            except ValueError as error:
                # What breaks the limits breaks them on each tile: the first says it.
                left_out.append(f"{kind} of {_text(sizes)}, {rows} rows: {' '.join(str(error).splitlines()[:2])}")
    return programs, list(dict.fromkeys(left_out))


def _rounded(context: int, sizes: dict[str, Any], target: str) -> int:
    """A context in whole chunks of both designs of attention; that for one token may have no place for the heads."""
    heads = [sizes[name] for name in ("num_heads", "kv_num_heads", "head_size")]
    chunk = FlowQKV(target, *heads).keys
    with contextlib.suppress(ValueError):  # said where its program is made
        chunk = math.lcm(chunk, FlowKV(target, *heads).keys)
    return ceil_div(context, chunk) * chunk


def _text(sizes: dict[str, Any]) -> str:
    return ", ".join(f"{name} {size}" for name, size in sizes.items())
