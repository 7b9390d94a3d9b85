# SPDX-License-Identifier: Apache-2.0
"""An answer while it is computed: clients that wait long hear of it, and OpenTelemetry gets a span of it."""

import asyncio
import json
from types import SimpleNamespace

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from flownpu.generate.language_model import Sampling
from flownpu.generate.worker import Failed, Finished, Piece, Started
from flownpu.serve import tracing
from flownpu.serve.answers import Answers
from flownpu.serve.errors import ApiError
from flownpu.serve.metrics import Metrics
from flownpu.serve.processes.protocol import Question
from flownpu.serve.settings import ServerSettings
from flownpu.serve.streams import line_stream

QUESTION = Question(({"role": "user", "content": "?"},), max_new_tokens=7, sampling=Sampling(temperature=0.5))
PARTS = [Started(3), Piece("Hi", 1), Finished("stop", 3, 1, 2)]


class Process:
    """A model whose events the test sends."""

    facts = SimpleNamespace(slots=1)
    requests = 0

    def submit(self, _question, deliver):
        self.deliver = deliver
        return 0

    def cancel(self, _number):
        pass


def asked(question=QUESTION, opened=None):
    process = Process()

    async def opening():
        if opened is not None:
            await opened.wait()
        return process

    return process, Answers("m", opening(), [question], ServerSettings({}), Metrics())


async def submitted(process):
    """Waits until the model was asked."""
    while not hasattr(process, "deliver"):
        await asyncio.sleep(0)


@pytest.fixture
def spans(monkeypatch):
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(tracing, "TRACER", provider.get_tracer("test"))
    return exporter.get_finished_spans


def test_begin_ends_when_patience_does_and_no_event_is_lost():
    async def scenario():
        process, answers = asked()
        await answers.begin(patience=0.01)
        for event in PARTS:
            process.deliver(event)
        return [event async for _, event in answers], answers.prompt_tokens

    assert asyncio.run(scenario()) == (PARTS[1:], 3)


def test_begin_ends_before_model_is_loaded_and_no_event_is_lost():
    async def scenario():
        opened = asyncio.Event()
        process, answers = asked(opened=opened)
        await answers.begin(patience=0.01)
        assert not hasattr(process, "deliver")
        opened.set()
        found = asyncio.create_task(anext(aiter(answers)))
        await submitted(process)
        for event in PARTS:
            process.deliver(event)
        return await found

    assert asyncio.run(scenario()) == (0, PARTS[1])


def test_end_of_answers_before_model_is_loaded_asks_nothing():
    async def scenario():
        process, answers = asked(opened=asyncio.Event())
        await answers.begin(patience=0.01)
        answers.end()
        with pytest.raises(asyncio.CancelledError):
            await anext(aiter(answers))
        assert not hasattr(process, "deliver")

    asyncio.run(scenario())


def test_begin_without_patience_waits_for_first_piece():
    async def scenario():
        process, answers = asked()
        begun = asyncio.create_task(answers.begin())
        done, _ = await asyncio.wait({begun}, timeout=0.05)
        assert not done
        for event in PARTS:
            process.deliver(event)
        await begun

    asyncio.run(scenario())


def test_stream_of_lines_has_beats_while_nothing_comes():
    async def documents():
        for number in range(2):
            await asyncio.sleep(0.1)
            yield {"number": number}
        raise ApiError(500, "broken")

    async def lines():
        stream = line_stream(documents(), {}, 0.03, lambda: {"beat": True})
        return [json.loads(line) async for line in stream.body_iterator]

    found = asyncio.run(lines())
    assert [one for one in found if one != {"beat": True}] == [{"number": 0}, {"number": 1}, {"error": "broken"}]
    assert found[0] == found[1] == {"beat": True}


def test_span_tells_of_answer(spans):
    async def scenario():
        process, answers = asked()
        begun = asyncio.create_task(answers.begin())
        await submitted(process)
        for event in PARTS:
            process.deliver(event)
        await begun
        assert [event async for _, event in answers]

    asyncio.run(scenario())
    (span,) = spans()
    assert span.name == "chat m"
    seconds = span.attributes["gen_ai.response.time_to_first_chunk"]
    assert 0 < seconds < 60
    assert dict(span.attributes) == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "flownpu",
        "gen_ai.request.model": "m",
        "gen_ai.request.max_tokens": 7,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.response.finish_reasons": ("stop",),
        "gen_ai.usage.input_tokens": 3,
        "gen_ai.usage.cache_read.input_tokens": 1,
        "gen_ai.usage.output_tokens": 2,
        "gen_ai.response.time_to_first_chunk": seconds,
    }


@pytest.mark.parametrize("event", [Failed(RuntimeError("gone")), None])
def test_span_tells_of_end_without_answer(spans, event):
    async def scenario():
        process, answers = asked(Question("text"))
        await answers.begin(patience=0.01)
        if event is not None:
            process.deliver(event)
            with pytest.raises(ApiError):
                [_ async for _ in answers]
        answers.end()

    asyncio.run(scenario())
    (span,) = spans()
    assert span.name == "text_completion m"
    if event is None:
        assert span.attributes["gen_ai.response.finish_reasons"] == ("cancelled",)
    else:
        assert (span.status.description, span.attributes["error.type"]) == ("gone", "RuntimeError")
