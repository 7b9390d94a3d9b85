# SPDX-License-Identifier: Apache-2.0
"""Candidates of models of which only the newest tokens go through the layers that share keys and values."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from flownpu.convert import convert
from flownpu.generate.language_model import LanguageModel, Sampling
from flownpu.generate.speculative.model import Speculation
from tests.convert.conftest import write_tiny
from tests.generate.conftest import Scripted, scripted

IDS = np.random.default_rng(8).integers(4, 260, 60).astype(np.int32)
OPTIONS = {"activations": "bf16"}


@pytest.mark.parametrize("wrong", [0, 3])
def test_candidates_in_e_form_change_no_text(wrong: int, tmp_path: Path, generate: Callable[..., list[int]]) -> None:
    """Gemma 4 through two prompts beyond its windows; candidates are right, or each third is wrong and taken back."""
    write_tiny("gemma4_text", tmp_path / "checkpoint")
    convert(tmp_path / "checkpoint", tmp_path / "model", kv_dtype="fp32")
    greedy = Sampling(temperature=0)
    plain = LanguageModel(tmp_path / "model", options=OPTIONS).generator(128, greedy)
    first = generate(plain, IDS[:40], 30)
    plain.get_logits()  # computes the last token
    second = generate(plain, IDS[40:], 20)
    text = [*IDS[:40].tolist(), *first, *IDS[40:].tolist(), *second]
    model = LanguageModel(tmp_path / "model", options=OPTIONS, speculation=Speculation(lookup=True))
    generator = scripted(model, Scripted(text, wrong), 128, greedy)
    assert [generate(generator, IDS[:40], 30), generate(generator, IDS[40:], 20)] == [first, second]
    assert generator.tally.candidates > 20
    # The candidates of a step, at most 4, may reach beyond the end of each text, where none is right.
    beyond = 2 * 3
    assert (generator.tally.candidates - generator.tally.kept <= beyond) == (wrong == 0)
