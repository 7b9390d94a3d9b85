# SPDX-License-Identifier: Apache-2.0
"""Draws the pictures of docs/npu.md, one for each design, from their plans; a test compares them."""

import sys
from pathlib import Path

from flownpu.aie.check import require_valid
from flownpu.aie.plan.drawing import draw
from flownpu.aie.plan.limits import LIMITS
from flownpu.npu.catalogue import catalogue

FOLDER = Path(__file__).resolve().parent.parent.parent / "docs" / "figures"
TARGET = "npu2"
# The model whose shapes most designs are drawn with. Its 8 heads share 4 KV heads, so that the picture of attention
# shows the distribution of heads to columns. One operator on rows represents all of them, which look alike.
MODEL = "gemma3-4b"
OPERATORS = {
    "fused_dqp": MODEL,
    "dequant_engine": MODEL,
    "gemm": MODEL,
    "flow_qkv": MODEL,
    "flow_kv": MODEL,
    "rms_norm": MODEL,
    "patch_pooling": "siglip",
    "decode_layer": MODEL,
}


def pictures() -> dict[Path, str]:
    """The SVGs by file; each shows the first call of an operator in the catalogue."""
    calls = {operator: catalogue(TARGET, [operator], [model])[0] for operator, model in OPERATORS.items()}
    plans = {operator: call.program(0).resolve_program(f"{call.array}.{call.name}") for operator, call in calls.items()}
    return {
        FOLDER / f"npu-{operator}.svg": draw(require_valid(plan), LIMITS[TARGET]) for operator, plan in plans.items()
    }


if __name__ == "__main__":
    for path, picture in pictures().items():
        path.write_text(picture, encoding="utf-8")
        sys.stdout.write(f"{path.name} is written\n")
