# SPDX-License-Identifier: Apache-2.0
"""Candidates, right or wrong, do not change tokens: greedy or sampled, with guidance or penalties."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flownpu.generate.conversation import Conversation
from flownpu.generate.guidance import Guidance
from flownpu.generate.language_model import LanguageModel, Sampling, Timing
from flownpu.generate.speculative.model import Speculation
from tests.generate.conftest import Scripted, scripted, steady

GREEDY = Sampling(temperature=0)
SAMPLINGS = [
    GREEDY,
    Sampling(temperature=1.0, seed=3),
    Sampling(temperature=0.8, top_k=20, seed=4),
    Sampling(temperature=1.0, top_p=0.9, seed=5),
]


def text_of(model: LanguageModel, prompt: str, count: int, sampling: Sampling) -> tuple[str, Timing]:
    timing = Timing()
    return "".join(model.complete(model.tokens_of_text(prompt), count, sampling, timing)), timing


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("kind", ["looking", "drafted"])
def test_candidates_do_not_change_text(
    kind: str, sampling: Sampling, plain: LanguageModel, held_out: str, request: pytest.FixtureRequest
) -> None:
    model = request.getfixturevalue(kind)
    for start in (0, 1500):
        prompt = held_out[start : start + 300]
        expected, _ = text_of(plain, prompt, 60, sampling)
        text, timing = text_of(model, prompt, 60, sampling)
        assert text == expected
        assert timing.candidates > 0
        assert timing.new_tokens - 1 <= timing.steps + timing.kept <= timing.new_tokens + 3


def test_repeating_text_takes_fewer_steps(
    looking: LanguageModel, plain: LanguageModel, generate: Callable[..., list[int]]
) -> None:
    """A grammar makes the small model repeat itself."""
    prompt, guidance = plain.tokens_of_text("The statement"), Guidance("start: /(one two three four\\. ){8}/")
    generator = looking.generator(256, GREEDY, guidance=guidance)
    found = generate(generator, prompt, 50)
    assert found == generate(plain.generator(256, GREEDY, guidance=guidance), prompt, 50)
    assert generator.tally.steps < 0.6 * len(found)


def test_model_as_its_own_draft_keeps_all_candidates(topics: Path, plain: LanguageModel, held_out: str) -> None:
    """All candidates are then kept: each step makes four tokens."""
    model = steady(LanguageModel(topics, speculation=Speculation(draft=topics)))
    text, timing = text_of(model, held_out[:200], 41, GREEDY)
    assert text == text_of(plain, held_out[:200], 41, GREEDY)[0]
    assert timing.kept == timing.candidates == 30
    assert timing.steps == 10


@pytest.mark.opencl
@pytest.mark.usefixtures("pocl")
def test_draft_on_gpu_keeps_text_of_cpu(topics: Path, plain: LanguageModel, held_out: str) -> None:
    """The GPU rounds otherwise, so that of its candidates some may be wrong; with the CPU's own all are right."""
    model = steady(LanguageModel(topics, speculation=Speculation(draft=topics, draft_device="gpu")))
    text, timing = text_of(model, held_out[:200], 41, GREEDY)
    assert text == text_of(plain, held_out[:200], 41, GREEDY)[0]
    assert timing.kept >= timing.candidates / 2
    with pytest.raises(RuntimeError, match="npu"):
        LanguageModel(topics, speculation=Speculation(draft=topics, draft_device="npu"))


@pytest.mark.parametrize("wrong", [0, 1, 2, 5])
@pytest.mark.parametrize("sampling", SAMPLINGS[:2])
def test_right_and_wrong_candidates_keep_text(
    wrong: int,
    sampling: Sampling,
    plain: LanguageModel,
    looking: LanguageModel,
    held_out: str,
    generate: Callable[..., list[int]],
) -> None:
    prompt = plain.tokens_of_text(held_out[700:1000])
    expected = generate(plain.generator(512, sampling), prompt, 50)
    candidates = Scripted([*prompt.tolist(), *expected], wrong=wrong)
    generator = scripted(looking, candidates, 512, sampling)
    assert generate(generator, prompt, 50) == expected
    assert generator.get_sequence(0).tolist() == [*prompt.tolist(), *expected]
    tally = generator.tally
    if wrong == 0:
        assert tally.kept == tally.candidates
    if wrong == 1:
        assert tally.kept == 0


def test_end_of_text_among_candidates_ends_answer(
    plain: LanguageModel, looking: LanguageModel, held_out: str, generate: Callable[..., list[int]]
) -> None:
    """Candidates after the end-of-text token are dropped, and the next turn continues after that token."""
    (end, *_) = sorted(plain.ending_tokens)
    prompt, more = plain.tokens_of_text(held_out[:300]), plain.tokens_of_text(held_out[300:400])
    # A constraint that has the text end after four letters.
    guidance = Guidance("start: /[a-z]{4}/")
    expected_generator = plain.generator(512, GREEDY, guidance=guidance)
    expected = generate(expected_generator, prompt, 20)
    assert expected[-1] in plain.ending_tokens
    script = [*prompt.tolist(), *expected[:-1], end, 7, 7]
    generator = scripted(looking, Scripted(script), 512, GREEDY, guidance=guidance)
    assert generate(generator, prompt, 20) == expected
    assert generator.is_done()
    assert generator.get_sequence(0).tolist() == expected_generator.get_sequence(0).tolist()
    assert generate(generator, more, 3) == generate(expected_generator, more, 3)


@pytest.mark.parametrize(
    "guidance",
    [
        Guidance("start: /([a-z]+ ){12}/"),
        Guidance('start: %json {"type": "array", "items": {"enum": ["abc", "b"]}, "minItems": 8}'),
    ],
)
def test_candidates_follow_guidance(
    guidance: Guidance, plain: LanguageModel, looking: LanguageModel, generate: Callable[..., list[int]]
) -> None:
    prompt = plain.tokens_of_text("The statement is used to")
    expected = generate(plain.generator(256, GREEDY, guidance=guidance), prompt, 40)
    for candidates in (Scripted([*prompt.tolist(), *expected], wrong=3), None):
        generator = looking.generator(256, GREEDY, guidance=guidance)
        if candidates is not None:
            generator = scripted(looking, candidates, 256, GREEDY, guidance=guidance)
        assert generate(generator, prompt, 40) == expected
        assert generator.tally.candidates > 0


def test_penalty_of_folder_does_not_change_text(topics: Path, tmp_path: Path, held_out: str) -> None:
    """A penalty of repetitions looks at the whole sequence, the prompt included."""
    folder = shutil.copytree(topics, tmp_path / "penalised")
    settings = json.loads((folder / "genai_config.json").read_text())
    settings["search"] |= {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3}
    (folder / "genai_config.json").write_text(json.dumps(settings))
    plain, model = LanguageModel(folder), steady(LanguageModel(folder, speculation=Speculation(lookup=True)))
    for prompt in ("One two three four. " * 6, held_out[:300]):
        assert text_of(model, prompt, 50, GREEDY)[0] == text_of(plain, prompt, 50, GREEDY)[0]


@pytest.mark.parametrize("kind", ["looking", "drafted"])
def test_conversation_turns_keep_text(
    kind: str, plain: LanguageModel, held_out: str, request: pytest.FixtureRequest
) -> None:
    """Replies that are cut short, and turns that go on from what the cache holds."""
    model = request.getfixturevalue(kind)
    talks = [Conversation(each, GREEDY, 512) for each in (plain, model)]
    for turn in range(4):
        said = held_out[200 * turn : 200 * turn + 100]
        replies = []
        for talk in talks:
            reply = talk.reply(said, Timing())
            replies.append("".join(text for text, _ in zip(reply, range(13 + turn), strict=False)))
            reply.close()
        assert replies[0] == replies[1]


def test_rewound_sequence_equals_fresh(
    plain: LanguageModel, looking: LanguageModel, held_out: str, generate: Callable[..., list[int]]
) -> None:
    """Back to the middle of a step and to the prompt's end, and on without a new prompt; then into the prompt."""
    prompt = plain.tokens_of_text(held_out[:400])
    expected = generate(plain.generator(512, GREEDY), prompt, 30)
    known = [*prompt.tolist(), *expected]
    generator = scripted(looking, Scripted(known, wrong=4), 512, GREEDY)
    generate(generator, prompt, 11)
    for length in (len(prompt) + 9, len(prompt) + 4, len(prompt)):
        generator.rewind_to(length)
        assert generator.token_count() == length
        found: list[int] = []
        while len(found) < 8:
            logits = generator.get_logits().reshape(-1)
            generator.generate_next_token()
            found.append(int(generator.get_next_tokens()[0]))
            assert found[-1] == logits.argmax()
        assert found == known[length : length + 8]
    again = plain.tokens_of_text(held_out[500:600])
    generator.rewind_to(len(prompt) - 5)
    reference = plain.generator(512, GREEDY)
    joined = np.concatenate([prompt[:-5], again])
    assert generate(generator, again, 10) == generate(reference, joined, 10)


@pytest.mark.parametrize("kv_dtype", ["bf16", "fp32"])
def test_window_sized_caches_keep_text(
    kv_dtype: Any, converted: Callable[..., Path], held_out: str, generate: Callable[..., list[int]]
) -> None:
    """There are candidates until tokens leave the cache: from then on, a wrong candidate could not be taken back."""
    folder = converted(kv_dtype=kv_dtype, sliding_window_cache=True)
    without = LanguageModel(folder)
    model = steady(LanguageModel(folder, speculation=Speculation(lookup=True)))
    assert model.speculative is not None
    reach = model.speculative.reach
    assert reach == 64 + 16
    for length, count in ((60, 100), (900, 20)):
        prompt = without.tokens_of_text(held_out[:length])
        expected = generate(without.generator(512, GREEDY), prompt, count)
        generator = scripted(model, Scripted([*prompt.tolist(), *expected], wrong=3), 512, GREEDY)
        assert generate(generator, prompt, count) == expected
        assert (generator.tally.candidates > 0) == (len(prompt) < reach)
    talks = [Conversation(each, GREEDY, 512) for each in (without, model)]
    for turn in range(3):
        replies = [talk.reply(held_out[90 * turn : 90 * turn + 90], Timing()) for talk in talks]
        texts = ["".join(text for text, _ in zip(reply, range(40), strict=False)) for reply in replies]
        for reply in replies:
            reply.close()
        assert texts[0] == texts[1]


def test_growing_cache_and_all_logits_do_not_change_text(
    converted: Callable[..., Path], tmp_path: Path, held_out: str
) -> None:
    shutil.copytree(converted(logits="all"), tmp_path / "all")
    path = tmp_path / "all" / "genai_config.json"
    settings = json.loads(path.read_text())
    settings["search"]["past_present_share_buffer"] = False
    path.write_text(json.dumps(settings))
    model = steady(LanguageModel(tmp_path / "all", speculation=Speculation(lookup=True)))
    text, timing = text_of(model, held_out[:300], 40, GREEDY)
    assert text == text_of(LanguageModel(tmp_path / "all"), held_out[:300], 40, GREEDY)[0]
    assert timing.candidates > 0
