# SPDX-License-Identifier: Apache-2.0
"""Penalties, biases and min-p against transformers' processors and formulas in float64."""

import dataclasses
import json
import queue
import re
import shutil

import numpy as np
import pytest
import torch
from transformers import MinPLogitsWarper, RepetitionPenaltyLogitsProcessor, TemperatureLogitsWarper

from flownpu.errors import FlowNPUError
from flownpu.generate.engine_worker import EngineWorker
from flownpu.generate.generator_worker import GeneratorWorker
from flownpu.generate.language_model import LanguageModel, Sampling
from flownpu.generate.penalties import FAR, ChangedLogits, Penalties
from flownpu.generate.worker import Failed, Finished, Guidance, Piece, Request

PROMPT = "The list of the list of the list of"
SIZE = 60
WANTED = [
    Penalties(bias=((3, 5.0), (40, -100.0))),
    Penalties(repetition=1.3),
    Penalties(repetition=0.7, window=5),
    Penalties(frequency=0.7),
    Penalties(presence=-1.5),
    Penalties(frequency=0.4, presence=0.3, window=7),
    Penalties(min_p=0.3),
    Penalties(min_p=1.0),
    Penalties(((7, 2.5),), 1.2, 0.5, -0.5, 0.05),
    Penalties(((7, 2.5),), 1.2, 0.5, -0.5, 0.05, window=10**6),
]
# The model is so sure of its tokens that only strong penalties change an answer.
STRONG = [
    Penalties(bias=((506, 3.0), (379, -100.0))),
    Penalties(repetition=3.0),
    Penalties(repetition=3.0, window=9),
    Penalties(frequency=9.0),
    Penalties(presence=12.0),
    Penalties(frequency=5.0, presence=5.0, window=12),
    Penalties(((506, 3.0),), 1.5, 1.0, 1.0),
    Penalties(repetition=0.2, min_p=0.01),
]


def reference(penalties, logits, prompt, new, temperature):
    """Logits float64 [V] in which tokens that cannot be chosen are -inf, as libraries compute them."""
    row = np.array(logits, np.float64).reshape(-1)
    for token, value in penalties.bias:
        row[token] += value
    window = penalties.window
    repeated = [*prompt, *new] if window is None else [*prompt, *new][-window:]
    counted = new if window is None else repeated
    if penalties.repetition is not None:
        tokens = torch.tensor([repeated])
        row = RepetitionPenaltyLogitsProcessor(penalties.repetition)(tokens, torch.tensor(row[None])).numpy()[0]
    for token in set(counted):
        # https://platform.openai.com/docs/advanced-usage: mu[j] - c[j] * alpha_frequency - [c[j] > 0] * alpha_presence
        row[token] = row[token] - counted.count(token) * penalties.frequency - penalties.presence
    if penalties.min_p and temperature:
        none = torch.zeros((1, 0), dtype=torch.long)
        scaled = TemperatureLogitsWarper(temperature)(none, torch.tensor(row[None]))
        kept = MinPLogitsWarper(penalties.min_p)(none, scaled).numpy()[0]
        row = np.where(np.isneginf(kept), -np.inf, row)
    return row


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.9])
@pytest.mark.parametrize("penalties", WANTED)
def test_changed_logits_of_random_rows_equal_formulas(penalties, temperature):
    random = np.random.default_rng(0)
    prompt = random.integers(0, SIZE, 30).astype(np.int32)
    changed = ChangedLogits(penalties, prompt, temperature)
    new = []
    for _ in range(20):
        logits = random.normal(0, 4, (1, 1, SIZE)).astype(np.float32)
        before = logits.copy()
        found = changed.of(logits)
        assert np.array_equal(logits, before)
        assert (found.shape, found.dtype) == (logits.shape, np.float32)
        expected = reference(penalties, logits, prompt.tolist(), new, temperature)
        allowed = ~np.isneginf(expected)
        np.testing.assert_allclose(found[0, 0][allowed], expected[allowed], rtol=1e-5, atol=1e-5)
        assert (found[0, 0][~allowed] < found.max() - FAR / 2).all()
        new.append(int(random.integers(0, SIZE)))
        changed.add(new[-1])


def test_neutral_penalties_count_as_none():
    neutral = [Penalties(), Penalties(repetition=1.0), Penalties(window=64), Penalties(repetition=1.0, window=64)]
    assert [bool(each) for each in (*neutral, *WANTED)] == [False] * len(neutral) + [True] * len(WANTED)
    assert [each.only_repetition for each in WANTED] == [False, True] + [False] * 8


@pytest.fixture
def answer():
    """Asks a model's worker; returns the tokens of the answer and its last event."""
    workers = {}

    def ask(model, penalties, prompt=PROMPT, count=24, **fields):
        if model not in workers:
            kind = GeneratorWorker if model.dynamic_batching is None else EngineWorker
            workers[model] = kind(model, context=256)
        sampling = Sampling(fields.pop("temperature", 0), penalties=penalties, seed=fields.pop("seed", None))
        if workers[model].gives_likelihoods:
            fields["alternatives"] = 0
        events = queue.Queue()
        request = Request(model.tokens_of_text(prompt), count, sampling, **fields)
        workers[model].submit(request, events.put)
        pieces = []
        while not isinstance(event := events.get(timeout=60), Finished | Failed):
            if isinstance(event, Piece):
                pieces.append(event)
        if isinstance(event, Failed):
            raise event.error
        text = "".join(piece.text for piece in pieces)
        return [piece.likelihoods[0][0].token for piece in pieces if piece.likelihoods], text, event

    yield ask
    for worker in workers.values():
        worker.close()


def likeliest(model, penalties, count=24):
    """The likeliest tokens after the changes that `reference` makes."""
    prompt = model.tokens_of_text(PROMPT)
    generator = model.generator(256, Sampling(temperature=0))
    generator.append_tokens(prompt)
    new = []
    while len(new) < count and (not new or new[-1] not in model.ending_tokens):
        row = reference(penalties, generator.get_logits(), prompt.tolist(), new, 0)
        new.append(int(row.argmax()))
        generator.append_tokens(np.array(new[-1:], np.int32))
    return new


@pytest.mark.parametrize("penalties", STRONG)
@pytest.mark.parametrize("name", ["plain", "looking", "drafted"])
def test_answer_with_penalties_has_likeliest_tokens_after_them(name, penalties, answer, request):
    """With and without candidates, which are compared with the changed logits."""
    model = request.getfixturevalue(name)
    assert answer(model, penalties)[0] == likeliest(request.getfixturevalue("plain"), penalties)


def test_penalties_of_these_tests_change_answer(plain, answer):
    greedy = answer(plain, Penalties())[0]
    assert [penalties for penalties in STRONG if answer(plain, penalties)[0] == greedy] == []


@pytest.mark.parametrize("penalties", [*STRONG, Penalties(min_p=0.1)])
@pytest.mark.parametrize("name", ["looking", "drafted"])
def test_sampled_answer_with_candidates_is_one_without(name, penalties, answer, plain, request):
    drawn = [answer(model, penalties, temperature=1.3, seed=5)[0] for model in (plain, request.getfixturevalue(name))]
    assert drawn[0] == drawn[1]


def test_min_p_of_1_leaves_likeliest_token(plain, answer):
    assert answer(plain, Penalties(min_p=1.0), temperature=2, seed=1)[0] == answer(plain, Penalties())[0]
    assert answer(plain, Penalties(), temperature=2, seed=1)[0] != answer(plain, Penalties())[0]


def test_bias_of_100_decides_and_guidance_still_holds(plain, answer):
    (token,) = plain.tokens_of_text(" the")[1:]
    bias = Penalties(bias=((int(token), 100.0),))
    assert answer(plain, bias, count=4)[0] == [token] * 4
    # No allowed token passes min-p or has the bias, so the likeliest of the allowed tokens are taken.
    both = dataclasses.replace(bias, min_p=1.0, frequency=2.0)
    guided = answer(plain, both, count=6, temperature=1, seed=1, guidance=Guidance("start: /[0-9]{6,9}/"))[1]
    assert re.fullmatch("[0-9]+", guided)


def test_slot_goes_on_with_other_penalties(plain, answer):
    """Penalties are no part of GenAI's generator, so requests with other penalties use its cache."""
    answer(plain, Penalties(frequency=9.0))
    tokens, _, end = answer(plain, Penalties(presence=12.0))
    assert end.cached_tokens > 0
    assert tokens == likeliest(plain, Penalties(presence=12.0))
    tokens, _, end = answer(plain, Penalties())
    assert end.cached_tokens > 0
    assert tokens == likeliest(plain, Penalties())


@pytest.fixture(scope="module")
def repeating(topics, tmp_path_factory):
    """The model whose genai_config.json penalises repetitions much."""
    folder = tmp_path_factory.mktemp("repeating") / "topics"
    shutil.copytree(topics, folder)
    path = folder / "genai_config.json"
    configuration = json.loads(path.read_text())
    configuration["search"]["repetition_penalty"] = 3.0
    path.write_text(json.dumps(configuration))
    return LanguageModel(folder)


def test_repetition_penalty_of_request_replaces_models(repeating, plain, answer):
    assert answer(repeating, Penalties())[0] == likeliest(plain, Penalties(repetition=3.0))
    assert answer(repeating, Penalties(repetition=1.0))[0] == likeliest(plain, Penalties())
    assert answer(repeating, Penalties(repetition=1.3))[0] == likeliest(plain, Penalties(repetition=1.3))


@pytest.fixture(scope="module")
def paged(converted):
    return LanguageModel(converted(paged=True))


@pytest.mark.parametrize("repetition", [1.0, 1.3, 3.0])
def test_paged_model_penalises_repetitions(repetition, paged, plain, answer):
    penalties = Penalties(repetition=repetition)
    assert answer(paged, penalties)[1] == answer(plain, penalties)[1]


@pytest.mark.parametrize("penalties", [each for each in WANTED if not each.only_repetition])
def test_paged_model_refuses_other_changes(penalties, paged, answer):
    with pytest.raises(FlowNPUError, match=r"a paged model takes repetition_penalty, and no frequency_penalty"):
        answer(paged, penalties)


@pytest.mark.parametrize(("top_k", "top_p"), [(50, 0.0), (0, 0.0), (50, 1e-300), (1, 1.0)])
def test_bounds_leaving_one_token_leave_likeliest(top_k, top_p, plain):
    """GenAI takes no notice of top_p 0 beside top_k."""
    sampling = Sampling(2.0, top_k, top_p, 1)
    found = []
    for chosen in (sampling, Sampling(0)):
        generator = plain.generator(64, chosen)
        generator.append_tokens(plain.tokens_of_text(PROMPT))
        found.append([token for token, _ in plain.steps(generator)][:8])
    assert found[0] == found[1]
