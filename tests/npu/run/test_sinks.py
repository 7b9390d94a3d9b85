# SPDX-License-Identifier: Apache-2.0
"""A decoder whose heads have sinks, on the emulated array: against transformers' attention of GPT-OSS."""

import shutil

import numpy as np
import onnx
import onnx.numpy_helper
import pytest
import torch
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward
from transformers.models.llama import modeling_llama

from flownpu.npu.artifacts import build_artifacts
from tests.npu.decoders import Session, npu, read_nodes
from tests.npu.models import SIZES
from tests.npu.rounding import array_error
from tests.npu.run.steps import CONTEXT, run_all, steps_of

ATTENTION, HEAD_SINK = "FlowQKVAttention", 14
HEADS = SIZES["num_attention_heads"]


def with_sinks(folder, sinks):
    """Gives the attention of each layer its sinks [H]."""
    model = onnx.load(folder / "model.onnx", load_external_data=False)
    attentions = [node for node in model.graph.node if node.op_type == ATTENTION]
    for number, (node, of_layer) in enumerate(zip(attentions, sinks, strict=True)):
        name = f"sinks.{number}"
        model.graph.initializer.append(onnx.numpy_helper.from_array(of_layer, name))
        node.input.extend([""] * (HEAD_SINK - len(node.input)) + [name])
    onnx.save(model, folder / "model.onnx")


@pytest.mark.parametrize("ways", [("split",), ("pairs",)])
def test_logits_with_sinks_are_near_transformers(rng, ways, models, embed, tmp_path, monkeypatch):
    """A prompt in a chunk and two tokens, by each way of decoding; the bound is that of test_decoder_layers.py.

    Scores of this model have a deviation of about 1, so that a sink of 2 has as much weight as seven keys. A sink of
    -200 has none, and a head whose sink is 40 gives nothing.
    """
    model = models.checkpoint("llama")
    layers = model.reference.model.layers
    sinks = rng.uniform(-1, 3, (len(layers), HEADS)).astype(np.float32)
    sinks[0, :2] = 40, -200
    folder = tmp_path / "model"
    shutil.copytree(models.converted("llama"), folder)
    with_sinks(folder, sinks)
    build_artifacts(folder, context=CONTEXT, output=tmp_path / "artifacts", ways=ways)
    session = Session(npu.NpuDevice(str(tmp_path / "artifacts")), *read_nodes(folder))

    stops = 50, 51, 52
    ids, lasts = rng.integers(3, 300, stops[-1]), [stop - 1 for stop in stops]
    found = run_all(session, embed("llama", ids), steps_of(*stops))
    without = model.logits(ids[None])[0, lasts]
    monkeypatch.setattr(modeling_llama, "eager_attention_forward", eager_attention_forward)
    for layer, of_layer in zip(layers, sinks, strict=True):
        monkeypatch.setattr(layer.self_attn, "sinks", torch.from_numpy(of_layer), raising=False)
    expected = model.logits(ids[None])[0, lasts]
    error = np.sqrt(np.square(found - expected).mean())
    bound = 2 * array_error(model.reference, ids, lasts, prompt=True)
    assert error < bound < expected.std() / 3
    assert bound < np.sqrt(np.square(without - expected).mean())
