# SPDX-License-Identifier: Apache-2.0
"""Draws the pictures of docs/npu.md, one for each design, from their plans; a test compares them."""

import sys
from pathlib import Path

from flownpu.aie.check import require_valid
from flownpu.aie.designs.decode_layer.design import DecodeLayer
from flownpu.aie.designs.dequant_engine import DequantEngine
from flownpu.aie.designs.flow_kv import FlowKV
from flownpu.aie.designs.flow_qkv import FlowQKV
from flownpu.aie.designs.fused_dqp import FusedDQP
from flownpu.aie.designs.gemm import Gemm
from flownpu.aie.designs.patch_pooling import PatchPooling
from flownpu.aie.designs.vector_operators import RMSNorm
from flownpu.aie.plan.drawing import draw
from flownpu.aie.plan.limits import LIMITS
from flownpu.model.shapes import SHAPES
from flownpu.npu.models import decoder_of_configuration

FOLDER = Path(__file__).resolve().parent.parent.parent / "docs" / "figures"
TARGET = "npu2"
# A call of each design in the shapes of Gemma3-4B and its image encoder, by the title of its picture. The model's 8
# heads share 4 KV heads, so that the picture of attention shows the distribution of heads to columns. One operator on
# rows represents all of them, which look alike.
HEADS = (8, 4, 256)
CALLS = {
    "fused_dqp-32-k10240-none.m4096-k2560": FusedDQP(TARGET, 10240, 32).program(4096, 2560),
    "dequant_engine-bf16.m4096-k2560": DequantEngine(TARGET, "bf16").program(4096, 2560),
    "gemm-bf16-none.m512-k2560-n4096": Gemm(TARGET, "bf16").program(512, 2560, 4096),
    "flow_qkv-h8-g4-d256.tokens512-past0": FlowQKV(TARGET, *HEADS).program(512, 0, 4096),
    "flow_kv-h8-g4-d256.total4096": FlowKV(TARGET, *HEADS).program(4096, 4096),
    "rms_norm-n2560.rows1": RMSNorm(TARGET, 2560, 4).program(1, 1e-6),
    "patch_pooling-n1152-4-norm.grid64": PatchPooling(TARGET, 1152, 4, 8).program(64, epsilon=1e-6),
    "decode_layer-pairs-2560-10240-h8-g4-d256-geglu-post-qk.position4095": DecodeLayer(
        decoder_of_configuration(SHAPES["gemma3-4b"], "gemma3-4b").shape
    ).program(4095, 4096),
}


def pictures() -> dict[Path, str]:
    """The SVGs by file."""
    plans = {title: program.resolve_program(title) for title, program in CALLS.items()}
    return {
        FOLDER / f"npu-{title.partition('-')[0]}.svg": draw(require_valid(plan), LIMITS[TARGET])
        for title, plan in plans.items()
    }


if __name__ == "__main__":
    for path, picture in pictures().items():
        path.write_text(picture, encoding="utf-8")
        sys.stdout.write(f"{path.name} is written\n")
