# SPDX-License-Identifier: Apache-2.0
"""Families whose layers are no node of the GPU's: operators by themselves there, beside what its host computes."""

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

# What each form leaves to the host: the GPU's attention has no sinks.
FORMS = {"gemma4_text": {}, "gemma4_text with experts": {}, "gpt_oss": {"FlowQKVAttention": 3}}


@pytest.mark.parametrize("form", FORMS)
def test_logits_on_gpu_equal_transformers(form: str, tmp_path: Path, ep_devices: list[Any]) -> None:
    """A prompt beyond the windows, a second one and tokens; nothing but caches, of bf16, rounds."""
    tiny = make_checkpoint(form, tmp_path / "checkpoint")
    convert(tmp_path / "checkpoint", tmp_path / "model", kv_dtype="fp32")
    report = tmp_path / "placement.json"
    options = {"device": "gpu", "activations": "bf16", "on_unsupported": "cpu", "placement": str(report)}
    decoder = DecoderSession(tmp_path / "model", ep_devices[:1], options)
    found, expected = logits_of(decoder, CALLS), of_transformers(tiny, CALLS)
    print(np.abs(found-expected).max(), expected.std())
    placed = json.loads(report.read_text())
    print(placed["summary"], placed["on_host"][:2])
    config = tiny.reference.config
    tolerance = float32_tolerance(expected, config.num_hidden_layers, config.intermediate_size)
    print(tolerance)
    assert np.abs(found - expected).max() <= tolerance
