# SPDX-License-Identifier: Apache-2.0
"""optimum's BERT, ViT and CLIP, folded, in sessions with device=emulate: their products and attentions on the array."""

import math
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from flownpu.graph_rewrites.testing import BFLOAT16_ROUNDING, Array
from flownpu.npu.artifacts import build_artifacts
from tests.end_to_end.emulated_operators import session_of
from tests.npu.rounding import BLOCK_ROUNDING
from tests.rewrites.optimum_export import ENCODER
from tests.rewrites.optimum_reference import PRODUCTS, check_close, feeds_of, open_session, valid

BATCH, LAYERS = 2, int(ENCODER["num_hidden_layers"])
# Each product's relative error: both factors are rounded in blocks, one factor and the result to bf16. They are added
# as if all had the same sign. A wrong mask, bias or weight changes outputs by about their size.
ARRAY_TOLERANCE = PRODUCTS * (math.sqrt(2) * BLOCK_ROUNDING + 2 * BFLOAT16_ROUNDING)

# Products of a run, and dispatches of attention. CLIP's texts have a causal mask: with padding on the right, each layer
# takes one dispatch more; with padding on the left, where the first tokens see nothing, the host computes attention.
EXPECTED = {
    ("bert", "right"): (4 * LAYERS, BATCH * LAYERS),
    ("bert", "left"): (4 * LAYERS, BATCH * LAYERS),
    ("bert-classification", "right"): (4 * LAYERS + 1, BATCH * LAYERS),
    ("vit", "right"): (4 * LAYERS + 1, BATCH * LAYERS),
    ("clip", "right"): (2 * (4 * LAYERS + 1), (2 * BATCH + 1) * LAYERS),
    ("clip", "left"): (2 * (4 * LAYERS + 1), BATCH * LAYERS),
}


@pytest.fixture(scope="module")
def built(folded: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of converted models with artifacts, by name."""
    folder = tmp_path_factory.mktemp("emulated")
    names = sorted({name for name, _ in EXPECTED})
    for name in names:
        shutil.copytree(folded[name], folder / name)
        build_artifacts(folder / name, context=128)
    return {name: folder / name for name in names}


def run(file: Path, devices: list[Any], feeds: dict[str, Array], **options: str) -> tuple[Any, list[Any], Counter[str]]:
    """The placement, the outputs, and the number of dispatches of each design."""
    emulated = session_of(file, devices, on_unsupported="cpu", **options)
    outputs, dispatches = emulated.run(feeds)
    return emulated.placement, outputs, Counter(name.partition(",")[0].split()[0] for name in dispatches)


@pytest.mark.parametrize(("name", "pad"), EXPECTED)
def test_encoders_on_array_equal_transformers(
    name: str, pad: str, built: dict[str, Path], references: dict[str, Path], ep_devices: list[Any]
) -> None:
    reference = open_session(references[name])
    feeds = feeds_of(reference, pad=pad)
    placement, outputs, dispatches = run(built[name] / "model.onnx", ep_devices[:1], feeds)
    products, attentions = EXPECTED[name, pad]
    dense = name in ("vit", "bert-classification")  # the classifier, which is too small for blocks of Q4NX
    assert dispatches["gemm"] == products + (name == "bert-classification")
    assert dispatches["dequant_engine"] == dispatches["gemm"] - dense
    assert dispatches["flow_qkv"] == attentions
    # All but the convolution of patches is on the array.
    assert {left["op_type"] for left in placement["on_host"]} <= {"Conv"}
    expected = valid(reference, reference.run(None, feeds), feeds)
    check_close(expected, valid(reference, outputs, feeds), tolerance=ARRAY_TOLERANCE)


def test_small_models_run_on_host(built: dict[str, Path], ep_devices: list[Any]) -> None:
    reference = open_session(built["bert"])
    placement, _, dispatches = run(built["bert"] / "model.onnx", ep_devices[:1], feeds_of(reference), npu_threshold="")
    assert not dispatches
    assert placement["lowered"][0].startswith("FlowQKVAttention (2), Q4NXMatMul (8) below ")
    assert placement["lowered"][0].endswith(" multiply-adds a dispatch: the host is faster")
