# SPDX-License-Identifier: Apache-2.0
"""Gemma 4's drafter, which reads the model's keys and values: what it proposes, and that it changes no text."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flownpu.convert import ConversionError, convert
from flownpu.errors import FlowNPUError
from flownpu.generate.language_model import LanguageModel, Sampling
from flownpu.generate.speculative.drafter import DrafterCandidates
from flownpu.generate.speculative.model import Speculation
from tests.convert.conftest import write_tiny
from tests.fixtures.drafters import CLUSTERS, proposed, write_drafter
from tests.generate.conftest import steady

IDS = np.random.default_rng(8).integers(4, 260, 60).astype(np.int32)
OPTIONS = {"activations": "bf16"}
FORMS = [("gemma4_text", CLUSTERS, "bf16"), ("gemma4_unified_text", {}, "fp32")]
"""An E form, of which only the newest tokens have hidden states, and a model with keys of each layer."""


@pytest.mark.parametrize(("family", "more", "kv_dtype"), FORMS)
def test_candidates_of_drafter_equal_transformers(
    family: str,
    more: dict[str, Any],
    kv_dtype: str,
    tmp_path: Path,
    generate: Callable[..., list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In a text through two prompts beyond the windows, which is that of the model alone.

    With bf16 activations, a candidate is transformers' likeliest token, or one of a logit as near to it as roundings
    bring two: those of the model's states and of the drafter's own layers have 2^-9 of a standard deviation each. They
    may exchange the last cluster that is looked at for the next one, whose tokens have transformers' least logit.
    """
    target = write_tiny(family, tmp_path / "checkpoint")
    drafter = write_drafter(tmp_path / "draft", target.reference.config, **more)
    convert(tmp_path / "checkpoint", tmp_path / "model", kv_dtype=kv_dtype)
    convert(tmp_path / "draft", tmp_path / "drafter", kv_dtype=kv_dtype)
    greedy = Sampling(temperature=0)
    plain = LanguageModel(tmp_path / "model", options=OPTIONS).generator(128, greedy)
    expected = [generate(plain, IDS[:40], 30)]
    plain.get_logits()  # computes the last token
    expected.append(generate(plain, IDS[40:], 20))
    asked: list[tuple[list[int], list[int]]] = []
    propose = DrafterCandidates.propose

    def recorded(source: DrafterCandidates, tokens: list[int], count: int) -> list[int]:
        # Each fourth step has no candidates, and the model's next run tells the drafter of one token.
        found = [] if len(asked) % 4 == 3 else propose(source, tokens, count)
        asked.append((list(tokens), found))
        return found

    monkeypatch.setattr(DrafterCandidates, "propose", recorded)
    model = steady(
        LanguageModel(tmp_path / "model", options=OPTIONS, speculation=Speculation(draft=tmp_path / "drafter"))
    )
    generator = model.generator(128, greedy)
    assert [generate(generator, IDS[:40], 30), generate(generator, IDS[40:], 20)] == expected
    assert generator.tally.candidates > 20
    decided, exchanged = 0, 0
    for tokens, found in [one for one in asked if one[1]][::4]:
        likeliest, logits = proposed(drafter, target, tokens, len(found))
        for token, best, row in zip(found, likeliest, logits, strict=True):
            if more and row[token] == row.min():
                exchanged += 1
                break
            assert row.max() - row[token] < 0.1 * row.std(), (len(tokens), found, likeliest)
            if token != best:
                break  # those behind depend on this one
            decided += 1
    assert decided > 6
    assert exchanged < 2


def test_drafter_of_other_model_is_refused(tmp_path: Path) -> None:
    target = write_tiny("gemma4_text", tmp_path / "checkpoint")
    write_drafter(tmp_path / "draft", target.reference.config)
    convert(tmp_path / "checkpoint", tmp_path / "model")
    convert(tmp_path / "draft", tmp_path / "drafter", kv_dtype="int8")
    with pytest.raises(FlowNPUError, match=r"reads keys and values .* in tensor\(int8\).* the same --kv-dtype"):
        LanguageModel(tmp_path / "model", speculation=Speculation(draft=tmp_path / "drafter"))
    with pytest.raises(FlowNPUError, match="drafts for another model, whose keys and values it reads: `--draft"):
        LanguageModel(tmp_path / "drafter")
    with pytest.raises(ConversionError, match="leave --paged, --sliding-window-cache and --logits out"):
        convert(tmp_path / "draft", tmp_path / "paged", paged=True)
    write_tiny("gemma4_text", tmp_path / "wide", hidden_size=128)
    convert(tmp_path / "wide", tmp_path / "wider")
    with pytest.raises(
        FlowNPUError, match=r"drafts for a model with embeddings of 96 .* take the drafter of that model"
    ):
        LanguageModel(tmp_path / "wider", speculation=Speculation(draft=tmp_path / "drafter"))
