# SPDX-License-Identifier: Apache-2.0
"""Families on device=gpu: those whose layers are its node, and those that run as operators by themselves, beside what
its host computes."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flownpu.convert import convert
from tests.decoding import DecoderSession, float32_tolerance
from tests.families.cells import CALLS, logits_of, of_transformers
from tests.families.checkpoints import make_checkpoint

pytestmark = [pytest.mark.opencl, pytest.mark.usefixtures("pocl")]

# Whether the form's layers and LM head are one node: biases of QKV, and of the output projection, too; layers without
# RoPE; two tables of RoPE, between which positions choose; windows; a part of each head rotated; mixtures of experts.
FORMS = {
    "qwen2": True,
    "llama with biases": True,
    "smollm3": True,
    "phi3": True,
    "phi3 as phi4-mini": True,
    "phi3 with longrope": True,
    "qwen2 with windows": True,
    "qwen3_moe": True,
    "granitemoe": True,
    "gemma4_text": False,
    "gemma4_text with experts": False,
    "gpt_oss": True,
}


@pytest.mark.parametrize("form", FORMS)
def test_logits_on_gpu_equal_transformers(form: str, tmp_path: Path, ep_devices: list[Any]) -> None:
    """A prompt beyond the windows, a second one and tokens. Caches are float32, and with bf16 a GPU rounds nothing."""
    tiny = make_checkpoint(form, tmp_path / "checkpoint")
    convert(tmp_path / "checkpoint", tmp_path / "model", kv_dtype="fp32")
    report = tmp_path / "placement.json"
    options = {"device": "gpu", "activations": "bf16", "on_unsupported": "cpu", "placement": str(report)}
    decoder = DecoderSession(tmp_path / "model", ep_devices[:1], options)
    found, expected = logits_of(decoder, CALLS), of_transformers(tiny, CALLS)
    config = tiny.reference.config
    tolerance = float32_tolerance(expected, config.num_hidden_layers, config.intermediate_size)
    assert tolerance < expected.std() / 1000
    assert np.abs(found - expected).max() <= tolerance
    placed = json.loads(report.read_text())
    assert ("operators by themselves, since" not in placed["summary"]) == FORMS[form], placed["summary"]
    assert placed["on_host"] == []
