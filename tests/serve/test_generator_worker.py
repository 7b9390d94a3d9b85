# SPDX-License-Identifier: Apache-2.0
"""The worker over GenAI's generators: events, slots, kept conversations, and failures."""

import gc
import json
import queue

import numpy as np
import pytest

from flownpu.errors import FlowNPUError
from flownpu.generate.cached_sequence import CachedSequence
from flownpu.generate.generator_worker import GeneratorWorker
from flownpu.generate.guidance import Guidance
from flownpu.generate.language_model import LanguageModel, Sampling, Timing
from flownpu.generate.speculative.model import Speculation
from flownpu.generate.stop_texts import StopTexts
from flownpu.generate.worker import Failed, Finished, Piece, Request, Started

GREEDY = Sampling(temperature=0)
# JSON that is not complete before the limit of tokens.
ENDLESS = Guidance('start: %json {"type": "array", "items": {"const": "abc"}, "minItems": 5000}')
BAD = Guidance("start: (")
# After its first token, llguidance has more alternatives than it follows.
TOO_MANY = Guidance(
    f"start: %json {json.dumps({'type': 'object', 'properties': {f'p{i}': True for i in range(1000)}})}"
)


@pytest.fixture(scope="module")
def model(topics):
    return LanguageModel(topics)


@pytest.fixture
def worker(model):
    worker = GeneratorWorker(model, context=512, slots=2)
    yield worker
    worker.close()


class Asked:
    """A request that is submitted to a worker, and its events as they come."""

    def __init__(self, worker, text, tokens=8, **fields):
        prompt = worker.model.tokens_of_text(text) if isinstance(text, str) else text
        self.request = Request(prompt, tokens, **{"sampling": GREEDY, **fields})
        self.events = queue.Queue()
        worker.submit(self.request, self.events.put)

    def next(self):
        return self.events.get(timeout=30)

    def all(self):
        events = [self.next()]
        while not isinstance(events[-1], Finished | Failed):
            events.append(self.next())
        return events

    def text(self):
        return "".join(event.text for event in self.all() if isinstance(event, Piece))


def fresh(model, text, tokens):
    """The text of a generator that has seen nothing."""
    return "".join(model.complete(model.tokens_of_text(text), tokens, GREEDY, Timing()))


def test_answer_has_expected_events(worker, model):
    text = 'The "for" statement is used to'
    events = Asked(worker, text).all()
    assert isinstance(events[0], Started)
    assert [event.tokens for event in events[1:-1]] == [1] * 8
    assert events[-1] == Finished("length", len(model.tokens_of_text(text)), 0, 8)
    assert "".join(event.text for event in events[1:-1]) == fresh(model, text, 8)


def test_reused_slot_equals_fresh_start(worker, model):
    """Continuing a sequence that was cut short, one that is rewound, and one that another slot keeps."""
    texts = [
        "Strings are",
        "Strings are sequences of",
        "Tuples and lists",
        "Strings are immutable",
        "Tuples and lists of",
    ]
    cached = []
    for text in texts:
        asked = Asked(worker, text, 6)
        events = asked.all()
        assert "".join(event.text for event in events[1:-1]) == fresh(model, text, 6)
        cached.append(events[-1].cached_tokens)
    assert cached[0] == 0
    assert all(count > 0 for count in (cached[1], cached[3], cached[4]))


def test_short_shared_beginning_keeps_other_conversation(worker, model):
    """Every prompt begins with <bos>, which is no reason to take the slot of a long conversation."""
    long, short = "The statement " * 20, "Zip"
    Asked(worker, long, 2).all()
    Asked(worker, short, 2).all()
    assert Asked(worker, long, 2).all()[-1].cached_tokens == len(model.tokens_of_text(long)) - 1


def test_requests_take_turns_and_rest_waits(worker):
    asked = [Asked(worker, f"Number {number}", 40, guidance=ENDLESS) for number in range(3)]
    for one in asked[:2]:
        assert isinstance(one.next(), Started)
    assert asked[2].events.empty()
    worker.cancel(asked[2].request)  # while it waits
    assert asked[2].all() == [Finished("cancelled", len(asked[2].request.tokens), 0, 0)]
    for one in asked[:2]:
        assert one.all()[-1].new_tokens == 40


def test_cancelled_request_ends_early(worker):
    asked = Asked(worker, "Number", 400, guidance=ENDLESS)
    for _ in range(5):
        asked.next()
    worker.cancel(asked.request)
    last = asked.all()[-1]
    assert last.reason == "cancelled"
    assert 4 <= last.new_tokens < 400
    worker.cancel(asked.request)  # it has ended: nothing happens
    assert Asked(worker, "Strings", 2).all()[-1].reason == "length"


def test_failing_request_leaves_others_unharmed(worker):
    others = Asked(worker, "Number", 30, guidance=ENDLESS)
    failed = Asked(worker, "Strings are", guidance=BAD).all()[-1]
    assert isinstance(failed.error, FlowNPUError)
    failed = Asked(worker, "Strings are", guidance=TOO_MANY).all()[-1]
    assert isinstance(failed.error, FlowNPUError)
    assert "GenAI's guidance cannot follow the grammar" in str(failed.error)
    beyond = Asked(worker, np.array([10**6], dtype=np.int32)).all()[-1]  # no token of the model's
    assert isinstance(beyond, Failed)
    assert others.all()[-1].new_tokens == 30


@pytest.mark.parametrize("text", ["€", "漢字", "😀", "Привет", "a – b", "é"])
def test_guidance_character_of_any_bytes_is_written(worker, text):
    """The model's tokenizer spells most of these with tokens of single bytes."""
    assert Asked(worker, "Strings are", 40, guidance=Guidance(f'start: "{text}"')).text() == text
    assert Asked(worker, "Strings are", 40, guidance=Guidance(f"start: /({text}|{text}x)!/")).text()[-1] == "!"


def test_stop_texts_and_context_end_answer(worker, model):
    text = fresh(model, "Strings are", 20)
    stop = text[8:12]
    events = Asked(worker, "Strings are", 20, stop=(stop,)).all()
    assert "".join(event.text for event in events[1:-1]) == text[: text.index(stop)]
    assert events[-1].reason == "stop"
    full = Asked(worker, np.full(500, 40, dtype=np.int32), 400, guidance=ENDLESS).all()[-1]
    assert (full.reason, full.prompt_tokens + full.new_tokens) == ("length", worker.context_length)


def test_seed_starts_anew(worker):
    sampling = Sampling(temperature=1.5, seed=3)
    texts = [Asked(worker, "Strings are", 12, sampling=sampling) for _ in range(3)]
    assert len({asked.text() for asked in texts}) == 1
    other = Asked(worker, "Strings are", 12, sampling=Sampling(temperature=1.5, seed=4))
    assert other.all()[-1].cached_tokens == 0


def test_likelihoods_equal_logits(worker, model):
    """Logarithms of probabilities are compared with those from GenAI's logits, in float64."""
    events = Asked(worker, "Strings are", 3, alternatives=2).all()
    generator = model.generator(64, GREEDY)
    generator.append_tokens(model.tokens_of_text("Strings are"))
    for event in events[1:-1]:
        logits = generator.get_logits().reshape(-1).astype(np.float64)
        expected = logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
        generator.generate_next_token()
        token = int(generator.get_next_tokens()[0])
        ((taken, *alternatives),) = event.likelihoods
        assert taken.token == token
        # A sum of 4096 terms of float64: its rounding is far below 1e-9. The logits are the same bits.
        assert abs(taken.logarithm - expected[token]) < 1e-9
        assert [one.token for one in alternatives] == np.argsort(-expected)[:2].tolist()
        assert [one.text for one in alternatives] == [model.tokenizer.text_of(one.token) for one in alternatives]


def test_closing_ends_running_and_waiting_requests(model):
    worker = GeneratorWorker(model, context=512, slots=1)
    running, waiting = (Asked(worker, "Number", 400, guidance=ENDLESS) for _ in range(2))
    running.next()
    worker.close()
    assert running.all()[-1].reason == waiting.all()[-1].reason == "cancelled"
    with pytest.raises(FlowNPUError, match="closed"):
        Asked(worker, "Strings")


@pytest.mark.parametrize(
    ("stops", "pieces", "passed", "found"),
    [
        (["abc"], ["xa", "b", "c", "d"], ["x", "", "", ""], "abc"),
        (["abc"], ["xa", "b", "d"], ["x", "", "abd"], ""),
        (["aab"], ["aaa", "b"], ["a", ""], "aab"),
        (["end", "en"], ["then ", "x"], ["th", ""], "en"),
        (["b", "abc"], ["ab", "c"], ["a", ""], "b"),
        ([""], ["any"], ["any"], ""),
        ([], ["any"], ["any"], ""),
    ],
)
def test_stop_text_ends_answer(stops, pieces, passed, found):
    texts = StopTexts(stops)
    assert [texts.add(piece) for piece in pieces] == passed
    assert texts.found == found


def test_text_held_back_for_stop_comes_at_end():
    texts = StopTexts(["abc"])
    assert texts.add("xab") + texts.rest() == "xab"


def test_emptied_slot_frees_cache_at_once(worker):
    """A KV cache must not wait for Python's garbage collector, which may run only after hundreds of requests."""
    gc.collect()
    gc.disable()
    try:
        before = sum(isinstance(one, CachedSequence) for one in gc.get_objects())
        for seed in range(6):
            Asked(worker, "Strings are", 3, sampling=Sampling(temperature=1, seed=seed)).all()
        Asked(worker, "Strings are", guidance=BAD).all()
        after = sum(isinstance(one, CachedSequence) for one in gc.get_objects())
    finally:
        gc.enable()
    assert after - before <= worker.slots


def test_candidates_change_no_answer(topics, model):
    """Likelihoods stay the same, too: in new and reused slots, with a stop text, with sampling and with guidance."""
    looking = LanguageModel(topics, speculation=Speculation(lookup=True))
    answers = []
    for each in (model, looking):
        worker = GeneratorWorker(each, context=512, slots=2)
        try:
            text = "Strings are sequences. Strings are sequences. Strings are"
            first = Asked(worker, text, 12, alternatives=2).all()
            pieces = [(event.text, event.likelihoods) for event in first if isinstance(event, Piece)]
            more = [Asked(worker, f"{text} of{end}", 12, stop=("e",)).text() for end in ("", " a", "")]
            sampled = Asked(worker, text, 12, sampling=Sampling(temperature=1.0, seed=5)).text()
            answers.append((pieces, more, sampled, Asked(worker, text, 8, guidance=ENDLESS).text()))
        finally:
            worker.close()
    assert answers[0] == answers[1]
