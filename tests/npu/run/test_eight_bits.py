# SPDX-License-Identifier: Apache-2.0
"""Decoders whose weights have 8 bits on the emulated array: all products, the LM head, biases, experts."""

from typing import Any

import numpy as np
import pytest

from flownpu.aie.programs.decode import DECODE_WAYS, HOST_EXPERTS
from tests.npu.decoders import Session, in_eight_bits, npu, read_nodes
from tests.npu.rounding import array_error
from tests.npu.run.steps import CONTEXT, run_all, steps_of

SLOW = pytest.mark.slow


@pytest.fixture
def session_of(models):
    """Opens a session of a model's weights in codes of 8 bits."""

    def session(name: str, ways: tuple[str, ...] = DECODE_WAYS, **options: Any) -> Session:
        nodes, outputs = read_nodes(models.converted(name, **options))
        device = npu.NpuDevice(str(models.artifacts(name, CONTEXT, ways, weights="q8", **options)))
        return Session(device, in_eight_bits(nodes), outputs)

    return session


@pytest.mark.parametrize(
    ("name", "prompt", "stops", "ways"),
    [
        ("trained", True, (50, 51, 52), DECODE_WAYS),
        ("biases", False, (1, 2, 3), ("split",)),
        # Experts of a prompt by the host, from the graph's constants; of a token on the array.
        ("experts", True, (50, 51, 52), ("split",)),
        pytest.param("experts", True, (50, 51, 52), (next(iter(HOST_EXPERTS)),), marks=SLOW),
    ],
)
def test_logits_are_near_transformers(rng, name, prompt, stops, ways, session_of, embed, models):
    """The weights are those of 4 bits, number by number; so is the bound (test_decoder_layers.py)."""
    session, model = session_of(name, ways), models.checkpoint(name)
    assert (session.attributes["layer.eight_bits"], session.attributes["head_eight_bits"]) == (0b1111, 1)
    ids = rng.integers(3, 300, stops[-1])
    found = run_all(session, embed(name, ids), steps_of(*stops))
    lasts = [stop - 1 for stop in stops]
    expected = model.logits(ids[None])[0, lasts]
    bound = 2 * array_error(model.reference, ids, lasts, prompt=prompt)
    assert np.sqrt(np.square(found - expected).mean()) < bound < expected.std() / 3


def test_logits_of_all_tokens_are_near_transformers(rng, session_of, embed, models):
    """The host multiplies the chunk's rows by the planes of the LM head, which the array has."""
    session, model, prompt = session_of("llama", logits="all"), models.checkpoint("llama"), 258
    ids = rng.integers(3, 300, prompt)
    before = session.device.counts()["dispatches"]
    found, _ = session.run(embed("llama", ids), prompt, session.past(CONTEXT))
    assert session.device.counts()["dispatches"] - before < prompt / 4
    expected = model.logits(ids[None])[0]
    bound = 2 * array_error(model.reference, ids, range(prompt), prompt=True)
    assert np.sqrt(np.square(found - expected).mean()) < bound < expected.std() / 3
