# SPDX-License-Identifier: Apache-2.0
"""Converted checkpoints of all families compute what transformers computes, each as one partition."""

import json
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
import transformers
from numpy.typing import NDArray

from flownpu.convert import convert
from flownpu.errors import FlowNPUError
from flownpu.model.converted import ConvertedModel
from flownpu.verify.graph import DecoderGraph
from flownpu.verify.runs import Checkpoint
from tests.convert.conftest import ALL_CONFIGS, TinyModel, write_tiny
from tests.convert.running import CALLS, IDS, assert_near
from tests.convert.test_numbers import tolerance
from tests.decoding import DecoderSession
from tests.end_to_end.test_numbers import ACTIVATIONS


def of_transformers(tiny: TinyModel) -> NDArray[np.float32]:
    """Logits [calls, V] of the last tokens, call by call: LongRoPE's factors depend on the length so far."""
    cache = transformers.DynamicCache(config=tiny.reference.config)
    return np.array([tiny.logits(IDS[:, start:stop], cache)[0, -1] for start, stop in CALLS])


# Forms that have layers with states.
STATES = ("lfm2", "lfm2_moe", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")
# Forms whose layers have heads of two sizes and norms of values.
GEMMA_4 = ("gemma4_text", "gemma4_unified_text", "gemma4_text with experts")
# Traits that the readers behind `export-q4nx` and `verify` do not support: they refuse such models.
NOT_READ_BACK = {
    **dict.fromkeys(GEMMA_4, "expected a Q4NXMatMul that makes its query, keys and values"),
    "gpt_oss": "QKV projection has a bias",
    "granitemoe": "a mixture of experts",
    "llama with biases": "QKV projection has a bias",
    "llama with yarn": "RoPE with a magnitude",
    **dict.fromkeys(STATES, "no place for a layer with a state"),
    "ministral3": "RoPE with a magnitude",
    "olmo2": "got a norm of all heads at once",
    "olmoe": "got a norm of all heads at once",
    "olmoe with normalised weights": "got a norm of all heads at once",
    "phi3 with longrope": "expected no position_ids",
    "phi3 as phi4-mini": "expected no position_ids",
    "qwen2": "QKV projection has a bias",
    "qwen2 with windows": "QKV projection has a bias",
    "mixtral": "a mixture of experts",
    "qwen3_moe": "a mixture of experts",
    "smollm3": "do_rotary = 1",
}
_ALL_HEADS = "queries of all heads are normalised at once"
NOT_VERIFIED = dict.fromkeys(("olmo2", "olmoe", "olmoe with normalised weights"), _ALL_HEADS) | dict.fromkeys(
    STATES, "layers with a state"
)


@pytest.mark.parametrize("family", ALL_CONFIGS)
def test_converted_logits_equal_transformers(
    family: str, tmp_path: Path, ep_devices: list[onnxruntime.OrtEpDevice]
) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    tiny = write_tiny(family, tmp_path / "checkpoint")
    expected = of_transformers(tiny)
    torch.set_num_threads(threads)
    convert(tiny.folder, tmp_path / "model", kv_dtype="fp32")
    config = tiny.reference.config

    def run(*devices: onnxruntime.OrtEpDevice, **options: str) -> NDArray[np.float32]:
        decoder = DecoderSession(tmp_path / "model", devices, options)
        return np.array([decoder(IDS[:, start:stop])[0, 0] for start, stop in CALLS])

    # The gated delta rule has twice the sums of attention: its convolution, the states' reading and change.
    sums = 2 if family in STATES else 1
    np.testing.assert_allclose(run(), expected, rtol=0, atol=np.sqrt(sums) * tolerance(expected, config))
    # With the larger roundings of int8, tokens may choose other experts.
    has_experts = hasattr(config, "num_experts_per_tok") or getattr(config, "enable_moe_block", False)
    for activations in ("bf16",) if has_experts else ACTIVATIONS:
        options = {"activations": activations, "placement": str(tmp_path / "placement.json")}
        assert_near(run(ep_devices[0], **options), expected, tiny, activations)
    report = json.loads((tmp_path / "placement.json").read_text())
    assert (report["left"], report["partitions"]) == ([], 1)
    check_refusals(family, tmp_path / "model")


def check_refusals(family: str, folder: Path) -> None:
    for names, read in (
        (NOT_READ_BACK, ConvertedModel),
        (NOT_VERIFIED, lambda path: DecoderGraph(path / "model.onnx")),
    ):
        if family in names:
            with pytest.raises(FlowNPUError, match=names[family]):
                read(folder)
        else:
            read(folder)


def test_multiplied_residual_stream_is_not_verified(tmp_path: Path) -> None:
    with pytest.raises(FlowNPUError, match="residual_multiplier"):
        Checkpoint(write_tiny("granite", tmp_path / "checkpoint").folder)


def test_verify_rounds_experts_and_leaves_routers(tmp_path: Path) -> None:
    """rounded_outputs gives the outputs of layers whose projections went through Q4NX, and whose routers did not."""
    tiny = write_tiny("qwen3_moe", tmp_path / "checkpoint")
    checkpoint = Checkpoint(tiny.folder)
    run = checkpoint.run(IDS[0])
    rounded = checkpoint.rounded_outputs(IDS[0], run)
    for layer, (arguments, keywords) in enumerate(checkpoint._calls[:-1]):
        with torch.no_grad():
            expected = tiny.reference.model.layers[layer](*arguments, **keywords)[0].numpy()
        np.testing.assert_array_equal(rounded.hidden[layer + 1], expected)
        assert not np.array_equal(rounded.hidden[layer + 1], run.hidden[layer + 1])
    np.testing.assert_array_equal(checkpoint.run(IDS[0]).logits, run.logits)  # the rounded weights are gone again
