# SPDX-License-Identifier: Apache-2.0
"""Gemma 4's E form, of whose layers the array takes single products: tokens in a session with device=emulate."""

from pathlib import Path
from typing import Any

import numpy as np

from flownpu.convert import convert
from flownpu.npu.artifacts import build_artifacts
from tests.convert.conftest import write_tiny
from tests.decoding import DecoderSession, dispatches_of
from tests.npu.rounding import array_error

PRODUCTS = 6 * 4 + 6 * 2 + 1 + 1  # of layers, of their own embeddings and of all of these, and the LM head
ATTENTIONS = 3  # the other three read keys and values of these, and are the host's


def test_tokens_of_e_form_on_array_equal_transformers(tmp_path: Path, ep_devices: list[Any]) -> None:
    """Beyond the windows of 8 tokens, through layers with heads of two sizes and shared keys.

    The error is less than twice that which the array's roundings to bf16 make in transformers' model. The host computes
    norms, sums and the gates of a layer's own embedding in f32.
    """
    tiny = write_tiny("gemma4_text", tmp_path / "checkpoint")
    convert(tmp_path / "checkpoint", tmp_path / "model")
    build_artifacts(tmp_path / "model", context=64)
    arrays = {path.name for path in (tmp_path / "model" / "artifacts" / "emulate" / "arrays").iterdir()}
    assert sum(name.startswith("fused_dqp-") for name in arrays) == 1  # tokens change it for attention alone
    options = {"device": "emulate", "on_unsupported": "cpu", "npu_threshold": "0", "activations": "bf16"}
    session = DecoderSession(tmp_path / "model", ep_devices[:1], options, tmp_path / "profile")
    ids = np.random.default_rng(6).integers(4, 260, 12)
    found = np.concatenate([session(token.reshape(1, 1))[0] for token in ids])
    expected = tiny.logits(ids[None])[0]
    dispatches = dispatches_of(session.session)
    assert len(dispatches) == len(ids) * (PRODUCTS + ATTENTIONS)
    assert sum(name.startswith("fused_dqp") for name in dispatches) == len(ids) * PRODUCTS
    error = np.sqrt(np.square(found - expected).mean())
    bound = 2 * array_error(tiny.reference, ids, range(len(ids)), prompt=False)
    assert error < bound < expected.std() / 3
