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

pytestmark = pytest.mark.opencl

# The operators that each form leaves to the host: the GPU's attention has no sinks.
FORMS: dict[str, set[str]] = {"gemma4_text": set(), "gemma4_text with experts": set(), "gpt_oss": {"FlowQKVAttention"}}


@pytest.mark.usefixtures("pocl")
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
    assert "operators by themselves, since" in placed["summary"]
    assert {item["op_type"] for item in placed["on_host"]} == FORMS[form]
