# SPDX-License-Identifier: Apache-2.0
"""What graphs of exporters have beside the layers: positions and masks as inputs, and logits of all tokens."""

import numpy as np
import pytest

from tests.npu.decoders import ATTENTION_BIAS, Session, npu, read_nodes, with_input, with_position_ids
from tests.npu.rounding import array_error
from tests.npu.run.steps import CONTEXT, run_all, steps_of


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "trained", "biases"])
def test_logits_of_all_tokens_are_near_transformers(rng, name, session_of, embed, models):
    """The host computes a chunk's logits, the array those of the tokens after it; the bound is as above."""
    session, model, prompt = session_of(name, logits="all"), models.checkpoint(name), 258
    ids = rng.integers(3, 300, prompt + 1)
    hidden, past = embed(name, ids), session.past(CONTEXT)
    before = session.device.counts()["dispatches"]
    found = np.concatenate(
        [session.run(hidden[start:stop], stop, past)[0] for start, stop in steps_of(prompt, len(ids))]
    )
    assert session.device.counts()["dispatches"] - before < prompt / 4
    expected = model.logits(ids[None])[0]
    error = np.sqrt(np.square(found - expected).mean())
    bound = 2 * array_error(model.reference, ids, range(len(ids)), prompt=True)
    assert error < bound < expected.std() / 3


def test_logits_of_padding_are_zeros(rng, session_of, embed):
    session = session_of("llama", logits="all")
    hidden = embed("llama", rng.integers(3, 300, 4))
    alone, _ = session.run(hidden[:2], 2, session.past(CONTEXT))
    padded, _ = session.run(hidden, 4, session.past(CONTEXT), length=2)
    assert padded[:2].tobytes() == alone.tobytes()
    assert not padded[2:].any()


def test_chunks_without_logits_are_not_used_for_all_logits(models):
    """Artifacts of the same model with the last token's logits: its prompts go token by token."""
    device = npu.NpuDevice(str(models.artifacts("llama", CONTEXT)))
    session = Session(device, *read_nodes(models.converted("llama", logits="all")))
    assert session.lowered.summary.endswith("prompts token by token")


def test_position_ids_choose_rows_of_rotary_tables(rng, models, embed):
    """RoPE depends on differences alone, so rows that follow one another from any row on give the same numbers.

    They round in other ways: by 2^-9 of a cosine or sine, which is less than what else is rounded.
    """
    nodes, outputs = read_nodes(models.converted("llama"))
    device = npu.NpuDevice(str(models.artifacts("llama", CONTEXT)))
    counted, given = Session(device, nodes, outputs), Session(device, with_position_ids(nodes), outputs)
    ids, steps = rng.integers(3, 300, 7), steps_of(5, 6, 7)
    hidden = embed("llama", ids)
    expected = run_all(counted, hidden, steps)
    found = {}
    for shift in (0, 600, 0):
        past = given.past(CONTEXT)
        found[shift] = np.array([
            given.run(hidden[start:stop], stop, past, positions=range(start + shift, stop + shift))[0]
            for start, stop in steps
        ])  # fmt: skip
    assert found[0].tobytes() == expected.tobytes()
    assert found[600].tobytes() != expected.tobytes()
    error = np.sqrt(np.square(found[600] - expected).mean())
    assert error < 2 * array_error(models.checkpoint("llama").reference, ids, [4, 5, 6], prompt=False)
    # A row that does not follow the others turns a key by another angle: the same bound tells it.
    past = given.past(CONTEXT)
    given.run(hidden[:5], 5, past, positions=range(5))
    turned = given.run(hidden[5:6], 6, past, positions=[305])[0]
    assert np.sqrt(np.square(turned - expected[1]).mean()) > 4 * error


def test_unfit_position_ids_are_refused(models):
    nodes, outputs = read_nodes(models.converted("llama"))
    session = Session(npu.NpuDevice(str(models.artifacts("llama", CONTEXT))), with_position_ids(nodes), outputs)
    past, hidden = session.past(CONTEXT), np.zeros((4, session.attributes["hidden"]), np.float32)
    with pytest.raises(npu.Unsupported, match="position_ids that follow one another, got 1 after 1: give such, or set"):
        session.run(hidden, 4, past, positions=[0, 1, 1, 2])
    with pytest.raises(npu.Unsupported, match="at least the tokens before them, got 3 after 4 tokens: pad prompts on"):
        session.run(hidden[:1], 5, past, positions=[3])
    with pytest.raises(RuntimeError, match=r"expected positions below 1024, .* got 1024: shorten the context"):
        session.run(hidden[:1], 1, past, positions=[1024])
    with pytest.raises(RuntimeError, match=r"position_ids of shape \[1, 4\], got \[1,3\]"):
        session.run(hidden, 4, past, positions=[0, 1, 2])


def test_attention_bias_that_masks_later_keys_changes_nothing(rng, models, embed, session_of):
    nodes, outputs = read_nodes(models.converted("llama"))
    device = npu.NpuDevice(str(models.artifacts("llama", CONTEXT)))
    session = Session(device, with_input(nodes, ATTENTION_BIAS, "bias", "float"), outputs)
    hidden, steps = embed("llama", rng.integers(3, 300, 6)), steps_of(5, 6)
    causal = np.triu(np.full((6, 6), -np.inf, np.float32), 1)
    past = session.past(CONTEXT)
    found = [
        session.run(hidden[start:stop], stop, past, bias=causal[None, None, start:stop, :stop].copy())[0]
        for start, stop in steps
    ]
    assert np.array(found).tobytes() == run_all(session_of("llama"), hidden, steps).tobytes()
    padded = causal[None, None, :5, :5].copy()
    padded[..., 3, 1] = -np.inf
    with pytest.raises(npu.Unsupported, match="got -inf for the token at position 3 and the key at 1: give texts wit"):
        session.run(hidden[:5], 5, past, bias=padded)
    with pytest.raises(RuntimeError, match=r"attention_bias of shape \[batch, heads, 5, 5 or more\], got \[1,1,5,4\]"):
        session.run(hidden[:5], 5, past, bias=padded[..., :4].copy())
