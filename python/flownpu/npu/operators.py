# SPDX-License-Identifier: Apache-2.0
"""Makes the programs of single operators of a graph: products and attention outside of a decoder's or encoder's layers.

The execution provider's own code finds these nodes and their sizes (ops/npu/match/array_operator.h).
"""

import contextlib
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flownpu.aie.designs.common import ceil_div
from flownpu.aie.designs.flow_kv import FlowKV
from flownpu.aie.designs.flow_qkv import FlowQKV
from flownpu.aie.programs.operators import buckets, longest_row, operator_program
from flownpu.aie.programs.program import Program
from flownpu.model.onnx_file import load_model, reading


@dataclass(frozen=True)
class LeftOut:
    """A part of a model without a program.

    Attributes:
        what: what it is, in words; may be empty.
        reason: why there is no program.
        on_host: whether a session leaves it to the host, which `on_unsupported=error` does not allow; if not, the array
            computes it in another way.
    """

    what: str
    reason: str
    on_host: bool = True

    def __str__(self) -> str:
        return f"{self.what}: {self.reason}" if self.what else self.reason


def programs_of_graph(path: Path, target: str, context: int) -> tuple[list[Program], list[LeftOut]]:
    """The programs of a graph's operators, and what was left out.

    Args:
        path: an .onnx file.
        target: npu1 or npu2.
        context: how many keys attention has room for; rounded up to its chunks.

    Raises:
        FlowNPUError: the file is not an ONNX model, or its graph is damaged.
        MissingDependencyError: onnx_ir is not installed.
    """
    model = load_model(path, purpose="flownpu build MODEL")
    with reading(path):
        from flownpu.graph_rewrites.native_graph import describe_operators  # noqa: PLC0415 needs the extra "convert"

        found, reasons = describe_operators(model)
    programs, left_out = list[Program](), [LeftOut("", reason) for reason in reasons]
    different = {(kind, tuple(sorted(sizes.items()))): sizes for kind, sizes in found}
    longest = longest_row(different.values())
    for (kind, _), sizes in different.items():
        of_size, refused = list[Program](), dict[str, str]()
        for rows in buckets(kind):
            try:
                room = _rounded(context, sizes, target) if "num_heads" in sizes else 0
                if not room or rows <= room:
                    of_size.append(operator_program(kind, sizes, target, rows, room, longest))
            except ValueError as error:
                text = ", ".join(f"{name} {size}" for name, size in sizes.items())
                refused[f"{kind} of {text}, {rows} rows"] = first_of(error)
        programs += of_size
        # If a program takes any number of rows, the array computes all rows with it.
        left_out += [LeftOut(what, reason, on_host=not of_size) for what, reason in refused.items()]
    return programs, list(dict.fromkeys(left_out))


def first_of(error: ValueError) -> str:
    """The first two lines of an error: a plan that breaks a limit on one tile breaks the same limit on all tiles."""
    return " ".join(str(error).splitlines()[:2])


def _rounded(context: int, sizes: dict[str, Any], target: str) -> int:
    """A context rounded up to whole chunks of both attention designs, or of FlowQKV's if FlowKV refuses the heads."""
    heads = [sizes[name] for name in ("num_heads", "kv_num_heads", "head_size")]
    chunk = FlowQKV(target, *heads).keys
    with contextlib.suppress(ValueError):  # reported when its program is made
        chunk = math.lcm(chunk, FlowKV(target, *heads).keys)
    return ceil_div(context, chunk) * chunk
