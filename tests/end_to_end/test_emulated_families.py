# SPDX-License-Identifier: Apache-2.0
"""Forms of decoders from other families on the emulated array: multipliers, windows, other kinds of RoPE."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flownpu.convert import convert
from flownpu.npu.artifacts import build_artifacts
from tests.convert.conftest import write_tiny
from tests.decoding import DecoderSession
from tests.npu.models import SIZES
from tests.npu.rounding import array_error

# A prompt and three tokens; the window of 8 hides the first of them.
CALLS = ((0, 10), *((i, i + 1) for i in range(10, 13)))
FORMS: dict[str, dict[str, Any]] = {
    "granite": {},
    "llama with yarn": {},
    "mistral": {},
    "phi3": {"rope_parameters": {"rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": 0.75}},
}


@pytest.mark.parametrize("family", FORMS)
def test_logits_are_near_transformers(family: str, tmp_path: Path, ep_devices: list[Any]) -> None:
    """Off from transformers by at most twice the effect of roundings to bf16, as in
    tests/npu/run/test_decoder_layers.py.
    """
    tiny = write_tiny(family, tmp_path / "checkpoint", **{**SIZES, "num_hidden_layers": 2, **FORMS[family]})
    convert(tiny.folder, tmp_path / "model")
    build_artifacts(tmp_path / "model", context=64, output=tmp_path / "artifacts")
    options = {
        "device": "emulate",
        "artifacts": str(tmp_path / "artifacts"),
        "placement": str(tmp_path / "placement.json"),
    }
    decoder = DecoderSession(tmp_path / "model", ep_devices[:1], options)
    ids = np.random.default_rng(5).integers(4, 300, (1, CALLS[-1][1]))
    logits = np.array([decoder(ids[:, start:stop])[0, -1] for start, stop in CALLS])
    lasts = [stop - 1 for _, stop in CALLS]
    expected = tiny.logits(ids)[0, lasts]
    error = np.sqrt(np.square(logits.astype(np.float64) - expected).mean())
    bound = 2 * array_error(tiny.reference, ids[0], lasts, prompt=True)
    assert error < bound < expected.std() / 4
    report = json.loads((tmp_path / "placement.json").read_text())
    assert "emulate" in report["device"]
    assert report["left"] == []
    # Nothing that the array has a design for is left to its host.
    assert not {item["op_type"] for item in report["on_host"]} & {"Q4NXMatMul", "FlowQKVAttention"}
