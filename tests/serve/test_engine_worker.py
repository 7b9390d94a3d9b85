# SPDX-License-Identifier: Apache-2.0
"""GenAI's engine over the trained small model: requests that join and leave, each with separate settings."""

import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flownpu.errors import FlowNPUError
from flownpu.generate import engine_worker
from flownpu.generate.engine_worker import EngineWorker
from flownpu.generate.guidance import Guidance
from flownpu.generate.language_model import LanguageModel, Sampling, Timing
from flownpu.generate.worker import Event, Failed, Finished, Piece, Request, Started
from tests.serve.conftest import FIXTURES

EXACT = {"activations": "bf16"}
GREEDY = Sampling(temperature=0)
# Beginnings that the model continues without ending the text soon.
TEXTS = (
    'The "for" statement is used to',
    "Strings are",
    "If the class defines",
    "The following exceptions are raised when",
    "The expression list",
    "Class instances",
    "Modules are",
    "In the following",
)


class Answer:
    """Submits a request, and collects its events."""

    def __init__(self, worker: EngineWorker, request: Request, on_piece: Callable[[], None] | None = None) -> None:
        self.worker, self.request, self.on_piece = worker, request, on_piece
        self.events: list[Event] = []
        self._ended = threading.Event()
        worker.submit(request, self._hear)

    def _hear(self, event: Event) -> None:
        self.events.append(event)
        if isinstance(event, Piece) and self.on_piece is not None:
            self.on_piece()
        if isinstance(event, Finished | Failed):
            self._ended.set()

    def end(self) -> Finished:
        assert self._ended.wait(60)
        last = self.events[-1]
        if isinstance(last, Failed):
            raise last.error
        assert isinstance(last, Finished)
        return last

    @property
    def text(self) -> str:
        self.end()
        return "".join(event.text for event in self.events if isinstance(event, Piece))


@pytest.fixture(scope="module")
def model(genai: Any, paged_topics: Path) -> LanguageModel:  # noqa: ARG001
    return LanguageModel(paged_topics, options=EXACT)


@pytest.fixture(scope="module")
def held_out(model: LanguageModel) -> list[int]:
    """Tokens of text that the model was not trained on."""
    text = (FIXTURES / "gemma3-topics" / "held_out.txt").read_text()
    return model.tokens_of_text(text)[:1024].tolist()  # type: ignore[no-any-return]


@pytest.fixture
def worker(model: LanguageModel) -> Iterator[EngineWorker]:
    made = EngineWorker(model, context=1024)
    yield made
    made.close()


def small_cache(folder: Path, to: Path, blocks: int) -> LanguageModel:
    """The model with a KV cache of a few blocks."""
    shutil.copytree(folder, to)
    config = json.loads((to / "genai_config.json").read_text())
    config["engine"]["dynamic_batching"]["num_blocks"] = blocks
    (to / "genai_config.json").write_text(json.dumps(config))
    return LanguageModel(to, options=EXACT)


def ask(worker: EngineWorker, text: str, tokens: int = 24, **choices: Any) -> Answer:
    return Answer(worker, Request(worker.model.tokens_of_text(text), tokens, **{"sampling": GREEDY, **choices}))


def test_concurrent_answers_equal_single_ones(worker: EngineWorker) -> None:
    alone = [ask(worker, text).text for text in TEXTS]
    assert len(set(alone)) == len(TEXTS)
    together = [ask(worker, text, 24 + 3 * i) for i, text in enumerate(TEXTS)]
    for answer, text in zip(together, alone, strict=True):
        assert answer.text[: len(text)] == text
        first, *pieces, last = answer.events
        assert isinstance(first, Started)
        assert isinstance(last, Finished)
        assert last.new_tokens == sum(piece.tokens for piece in pieces if isinstance(piece, Piece))
        assert last.prompt_tokens == len(answer.request.tokens)


def test_paged_answer_equals_unpaged_model(
    worker: EngineWorker,
    genai: Any,  # noqa: ARG001
    topics: Path,
) -> None:
    """The paged model's attention rounds in another order, but after these beginnings no two likeliest tokens are that
    close.
    """
    plain = LanguageModel(topics, options=EXACT)
    for text in TEXTS[:4]:
        said = "".join(plain.complete(plain.tokens_of_text(text), 24, GREEDY, Timing()))
        assert ask(worker, text).text == said


def test_long_prompt_is_cut_beside_answers(worker: EngineWorker, held_out: list[int]) -> None:
    """700 tokens go in parts of at most 256, and a request that decodes goes on in between."""
    tokens = np.array(held_out[:700], np.int32)
    alone = Answer(worker, Request(tokens, 8, GREEDY)).text
    short_alone = ask(worker, TEXTS[0], 60).text
    worker.close()
    fresh = EngineWorker(worker.model, context=1024)
    try:
        long: list[Answer] = []
        started = threading.Event()

        def join() -> None:
            if not long:
                long.append(Answer(fresh, Request(tokens, 8, GREEDY)))
                started.set()

        short = Answer(fresh, Request(fresh.model.tokens_of_text(TEXTS[0]), 60, GREEDY), join)
        assert started.wait(60)
        assert short.text == short_alone
        assert long[0].text == alone
    finally:
        fresh.close()


def test_shared_prefix_is_not_computed_again(worker: EngineWorker, held_out: list[int]) -> None:
    prefix = held_out[:200]
    first = Answer(worker, Request(np.array(prefix + held_out[500:520], np.int32), 8, GREEDY))
    assert first.end().cached_tokens == 0
    again = Answer(worker, Request(np.array(prefix + held_out[500:520], np.int32), 8, GREEDY))
    assert again.end().cached_tokens == 208  # whole blocks of 16, but for the last token
    assert again.text == first.text
    other = Answer(worker, Request(np.array(prefix + held_out[900:930], np.int32), 8, GREEDY))
    assert other.end().cached_tokens == 192
    without = EngineWorker(worker.model, context=1024)
    try:
        anew = Answer(without, Request(other.request.tokens, 8, GREEDY))
        assert (anew.end().cached_tokens, anew.text) == (0, other.text)
    finally:
        without.close()


def test_shared_prefix_of_concurrent_requests_is_computed_once(worker: EngineWorker, held_out: list[int]) -> None:
    common, own = held_out[:200], [held_out[300 + 40 * n :][:40] for n in range(6)]
    prompts = [np.array(common + rest, np.int32) for rest in own]
    prompts.append(np.array(held_out[700:750], np.int32))
    answers = [Answer(worker, Request(prompt, 4, GREEDY)) for prompt in prompts]
    # Whole blocks of 16. Two compute their whole prompt: the first, and the one that begins differently.
    assert sorted(answer.end().cached_tokens for answer in answers) == [0, 0, 192, 192, 192, 192, 192]
    assert answers[0].end().cached_tokens == 0
    # Each answer equals a new worker's answer to the prompt alone.
    worker.close()
    for prompt, answer in zip(prompts, answers, strict=True):
        anew = EngineWorker(worker.model, context=worker.context_length)
        try:
            assert Answer(anew, Request(prompt, 4, GREEDY)).text == answer.text
        finally:
            anew.close()


def test_requests_keep_own_sampling(worker: EngineWorker) -> None:
    seeded = Sampling(temperature=1.5, top_k=100, seed=3)
    answers = [
        ask(worker, TEXTS[0]),
        ask(worker, TEXTS[0], sampling=seeded),
        ask(worker, TEXTS[0], sampling=seeded),
        ask(worker, TEXTS[0], sampling=Sampling(temperature=1.5, top_k=100, seed=4)),
        ask(worker, TEXTS[0], 12, guidance=Guidance("start: /[0-9]{3} (yes|no)/")),
        ask(worker, TEXTS[0], 5),
    ]
    greedy, one, same, other, guided, short = (answer.text for answer in answers)
    assert one == same
    assert len({greedy, one, other}) == 3
    assert guided[:3].isdigit()
    assert guided[3:] in (" yes", " no")
    assert answers[4].end().reason == "stop"
    assert greedy.startswith(short)
    assert (answers[5].end().reason, answers[5].end().new_tokens) == ("length", 5)


def test_stop_text_ends_answer(worker: EngineWorker) -> None:
    whole = ask(worker, TEXTS[0]).text
    middle = whole[len(whole) // 2 :][:6]
    answer = ask(worker, TEXTS[0], stop=(middle, "never there"))
    assert answer.text == whole[: whole.index(middle)]
    assert answer.end().reason == "stop"


def test_cancel_in_middle_ends_answer(worker: EngineWorker) -> None:
    alone = ask(worker, TEXTS[1], 40).text
    cancelled = Answer(
        worker, Request(worker.model.tokens_of_text(TEXTS[0]), 400, GREEDY), lambda: worker.cancel(cancelled.request)
    )
    beside = ask(worker, TEXTS[1], 40)
    assert cancelled.end().reason == "cancelled"
    assert cancelled.end().new_tokens < 400
    assert beside.text == alone
    worker.cancel(cancelled.request)  # again: nothing happens
    assert ask(worker, TEXTS[1], 40).text == alone


def test_requests_wait_for_blocks(paged_topics: Path, genai: Any, tmp_path: Path) -> None:  # noqa: ARG001
    """12 blocks of 16 tokens: two of these requests fit at a time, and all are answered."""
    worker = EngineWorker(small_cache(paged_topics, tmp_path / "model", 12), context=1024)
    try:
        assert worker.context_length == 12 * 16
        alone = [ask(worker, text, 70).text for text in TEXTS]
        answers = [ask(worker, text, 70) for text in TEXTS]
        assert [answer.text for answer in answers] == alone
        # A request that fills all blocks by itself, and one that does not fit into them.
        prompt = np.array(answers[0].request.tokens)
        assert Answer(worker, Request(prompt, 192 - len(prompt), GREEDY)).end().reason in ("length", "stop")
        with pytest.raises(FlowNPUError, match="192 tokens long and the model's context holds 192"):
            Answer(worker, Request(np.resize(prompt, 192), 1, GREEDY)).end()
    finally:
        worker.close()


def test_interrupted_requests_go_on(
    paged_topics: Path,
    genai: Any,  # noqa: ARG001
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All begin, grow until 12 blocks are full, and are interrupted in turn; one with a grammar never is."""
    worker = EngineWorker(small_cache(paged_topics, tmp_path / "model", 12), context=1024)
    interrupted: list[Any] = []
    interrupt = EngineWorker._interrupt

    def spy(self: EngineWorker) -> None:
        before = set(self._interrupted)
        interrupt(self)
        interrupted.extend(turn.request for turn in self._interrupted if turn not in before)

    monkeypatch.setattr(EngineWorker, "_interrupt", spy)
    monkeypatch.setattr(engine_worker, "_ROOM", 4)
    try:
        alone = [ask(worker, text, 90).text for text in TEXTS]
        guided = Guidance("start: /[0-9 ]{40}/")
        numbers = ask(worker, TEXTS[1], 60, guidance=guided).text
        assert not interrupted
        answers = [ask(worker, text, 90) for text in TEXTS]
        beside = ask(worker, TEXTS[1], 60, guidance=guided)
        again = [ask(worker, text, 90) for text in TEXTS]
        assert [answer.text for answer in answers] == alone
        assert [answer.text for answer in again] == alone
        assert beside.text == numbers
        assert interrupted
        assert beside.request not in interrupted
        for answer in answers:
            pieces = [event for event in answer.events if isinstance(event, Piece)]
            assert answer.end().new_tokens == sum(piece.tokens for piece in pieces)
    finally:
        worker.close()


def test_cancelled_blocks_are_free_again(paged_topics: Path, genai: Any, tmp_path: Path) -> None:  # noqa: ARG001
    worker = EngineWorker(small_cache(paged_topics, tmp_path / "model", 12), context=1024)
    try:
        for text in TEXTS:
            request = Request(worker.model.tokens_of_text(text), 170, GREEDY)
            answer = Answer(worker, request, lambda request=request: worker.cancel(request))  # type: ignore[misc]
            answer.end()
    finally:
        worker.close()


def test_refused_request_leaves_others_unharmed(worker: EngineWorker) -> None:
    good = ask(worker, TEXTS[0])
    with pytest.raises(FlowNPUError, match="GenAI's guidance cannot follow the grammar"):
        ask(worker, TEXTS[0], guidance=Guidance("start: /[0-9/")).end()
    with pytest.raises(FlowNPUError, match="shorten the prompt"):
        Answer(worker, Request(np.ones(1024, np.int32), 1, GREEDY)).end()
    assert good.text == ask(worker, TEXTS[0]).text


def test_guidance_character_of_byte_tokens_is_written(worker: EngineWorker) -> None:
    answers = [ask(worker, TEXTS[0], 40, guidance=Guidance(f'start: "{text}"')) for text in ("€", "漢字", "😀")]
    assert [answer.text for answer in answers] == ["€", "漢字", "😀"]


def test_endlessly_repeating_grammar_ends_with_its_request(worker: EngineWorker) -> None:
    """GenAI's engine then computes no tokens, and does not name the request."""
    alone, guided = ask(worker, TEXTS[0], 60).text, Guidance("start: /[0-9 ]{300}/")
    numbers = ask(worker, TEXTS[1], 200, guidance=guided).text
    schema = json.dumps({"type": "object", "properties": {f"p{number}": True for number in range(1000)}})
    # It works for some tokens, and meanwhile others with grammars begin.
    bad = ask(worker, TEXTS[2], 60, guidance=Guidance(f"start: /[a-z]{{40}}/ object\nobject: %json {schema}"))
    good, other = ask(worker, TEXTS[0], 60), ask(worker, TEXTS[1], 200, guidance=guided)
    assert (good.text, other.text) == (alone, numbers)
    with pytest.raises(FlowNPUError, match=r"cannot follow the grammar: .* row has"):
        bad.end()
    assert len(bad.events) > 3


def test_runs_repeated_for_a_while_keep_sound_grammar(worker: EngineWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    guided = Guidance("start: /[0-9 ]{300}/")
    numbers = ask(worker, TEXTS[1], 40, guidance=guided).text
    monkeypatch.setattr(engine_worker, "_REPEATS", -1)  # as if all runs were repeated
    assert ask(worker, TEXTS[1], 40, guidance=guided).text == numbers


def test_endlessly_repeated_run_without_grammar_fails(worker: EngineWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    running = ask(worker, TEXTS[0], 900)
    blamed: list[int] = []
    blame = EngineWorker._blame

    def spy(self: EngineWorker) -> None:
        blamed.append(len(self._turns))
        blame(self)

    monkeypatch.setattr(EngineWorker, "_blame", spy)
    monkeypatch.setattr(engine_worker, "_REPEATS", -1)  # as if each run were one too many,
    monkeypatch.setattr(engine_worker, "_PATIENCE", -1)  # for too long
    with pytest.raises(RuntimeError, match="repeats its run without end"):
        running.end()
    monkeypatch.undo()
    assert blamed == [1]
    assert ask(worker, TEXTS[0]).text


def test_failed_run_ends_its_requests_alone(worker: EngineWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker refuses an id beyond the table's rows. If it cannot know the rows, the model refuses the whole run."""
    good = ask(worker, TEXTS[0]).text
    unknown = Request(np.array([2, 4096], np.int32), 4, GREEDY)
    with pytest.raises(FlowNPUError, match="expected tokens from 0 to 4095, got 4096"):
        Answer(worker, unknown).end()
    monkeypatch.setattr(worker.model, "vocabulary_size", 5000)
    bad: list[Answer] = []
    running = Request(worker.model.tokens_of_text(TEXTS[1]), 900, GREEDY)

    def send_it() -> None:
        if not bad:
            bad.append(Answer(worker, unknown))

    beside = Answer(worker, running, send_it)
    with pytest.raises(RuntimeError, match=r"expected indices in \[0, 4096\), got 4096"):
        beside.end()
    with pytest.raises(RuntimeError, match=r"expected indices in \[0, 4096\), got 4096"):
        bad[0].end()
    assert ask(worker, TEXTS[0]).text == good


def test_close_ends_running_requests(model: LanguageModel) -> None:
    worker = EngineWorker(model, context=1024)
    running = [ask(worker, text, 900) for text in TEXTS[:3]]
    while not any(isinstance(event, Piece) for event in running[0].events):
        time.sleep(0.01)
    worker.close()
    assert {answer.end().reason for answer in running} <= {"cancelled", "stop"}
    with pytest.raises(FlowNPUError, match="being closed"):
        ask(worker, TEXTS[0])


def test_generators_refuse_paged_model_and_engine_any_other(
    model: LanguageModel,
    topics: Path,
    genai: Any,  # noqa: ARG001
) -> None:
    with pytest.raises(FlowNPUError, match="is a paged model, which `flownpu serve` runs"):
        model.generator(16, GREEDY)
    with pytest.raises(FlowNPUError, match="convert it with --paged"):
        EngineWorker(LanguageModel(topics), context=16)
