# SPDX-License-Identifier: Apache-2.0
"""The service behind the routes of all APIs: finds a request's model and begins its answers."""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from flownpu.generate.answer_format import AnswerFormat, Schemas, State
from flownpu.generate.worker import Finished, Likelihood, Piece
from flownpu.serve.answers import Answers
from flownpu.serve.errors import invalid, too_slow
from flownpu.serve.grammars.form import AnswerForm, offered
from flownpu.serve.grammars.process import GrammarProcess
from flownpu.serve.metrics import Metrics
from flownpu.serve.models import Models
from flownpu.serve.processes.model_process import ModelProcess
from flownpu.serve.processes.protocol import Question
from flownpu.serve.requests.openai import ChatRequest, CompletionRequest, Shared
from flownpu.serve.settings import ServerSettings
from flownpu.serve.tools import AnswerReader, CallFormat, MarkedReader, ToolCall

log = logging.getLogger(__name__)

UNENFORCED = "FlowNPU-Unenforced"
"""The response's header that tells which keywords of schemas the answer may violate."""
LEFT_OUT = "FlowNPU-Left-Out"
"""The response's header that tells which parts of the request were left out."""
LISTED = 20
"""Most names in a response's header: servers and clients limit a header to some kilobytes."""
DECODING = 2
"""Conversations whose images are decoded at the same time; each image may take 400 MiB meanwhile."""


@dataclass(frozen=True)
class Delta:
    """Further text of one answer; `index` is that of its question."""

    index: int
    text: str
    thought: str = ""
    likelihoods: tuple[tuple[Likelihood, ...], ...] = ()


@dataclass(frozen=True)
class End:
    """The end of one answer."""

    index: int
    reason: str
    """OpenAI's word: "stop", "length" or "tool_calls"."""
    calls: list[ToolCall]
    finished: Finished


@dataclass
class Chat:
    """The answers to a chat or a completion."""

    answers: Answers
    calls: CallFormat | None = None
    """How calls of functions are written in the answers; None: there are none."""
    format: AnswerFormat | None = None
    """How the model marks its thoughts and calls, in the place of `calls`."""
    begins: State | None = None
    functions: Schemas = field(default_factory=dict)
    """Schemas of the functions that may be called, for `format`."""
    unenforced: tuple[str, ...] = ()
    """Places of schemas' keywords that the answers may violate, see `Grammar.left_out`."""

    @property
    def headers(self) -> dict[str, str]:
        """The response's headers that name the unenforced parts of a schema."""
        return _listing(UNENFORCED, self.unenforced)

    async def events(self) -> AsyncIterator[Delta | End]:
        """The answers' texts as they come, and their ends."""
        readers = [self._reader() for _ in self.answers.questions]
        try:
            async for index, event in self.answers:
                if isinstance(event, Piece):
                    said = readers[index].add(event.text)
                    # A token without text, such as a part of a character, is sent, too, because clients measure the
                    # times of tokens.
                    if any(said) or event.likelihoods or (self.calls is None and self.format is None):
                        yield Delta(index, *said, event.likelihoods)
                    continue
                rest, calls = readers[index].finish()
                if any(rest):
                    yield Delta(index, *rest)
                if self.answers.settings.logs_texts:
                    log.info("%s: answered %r", self.answers.name, readers[index].text)
                reason = "tool_calls" if calls else "length" if event.reason == "length" else "stop"
                yield End(index, reason, calls, event)
        finally:
            self.answers.end()

    def _reader(self) -> AnswerReader:
        if self.format is None:
            return AnswerReader(self.calls)
        return MarkedReader(self.format, self.begins, self.functions)


def left_out(names: Sequence[str]) -> dict[str, str]:
    """The response's header that tells which tools and items of a request this server does not know, if any."""
    if names:
        log.info("left out: %s", ", ".join(map(ascii, names[:LISTED])))
    return _listing(LEFT_OUT, [ascii(name[:64])[1:-1] for name in names])


def _listing(header: str, names: Sequence[str]) -> dict[str, str]:
    more = len(names) - LISTED
    text = ", ".join([*names[:LISTED], *([f"and {more} more"] if more > 0 else [])])
    return {header: text} if names else {}


class Service(Models):
    """Asks the models of a server."""

    def __init__(self, settings: ServerSettings) -> None:
        super().__init__(settings)
        self.grammars = GrammarProcess()
        self.metrics = Metrics()
        self._decoding = asyncio.Semaphore(DECODING)

    async def close(self) -> None:
        """Closes all models."""
        await super().close()
        await self.grammars.close()

    async def chat(self, request: ChatRequest) -> Chat:
        """Begins the answers to a conversation.

        Raises:
            ApiError: the request is wrong, or the model cannot answer it, see `ask`.
        """
        limits, model = self.settings.limits, self.model(request.model)
        conversation = await asyncio.to_thread(model.conversation, request, limits.images)
        marks = await asyncio.to_thread(model.marks, conversation)
        form = AnswerForm.of(request, model.calls, marks)
        try:
            async with asyncio.timeout(limits.request_seconds):
                grammar = await self.grammars.compile(form)
        except TimeoutError:
            raise too_slow(limits.request_seconds) from None
        async with self._decoding:
            images = await asyncio.to_thread(model.read_images, conversation)
        question = Question(
            tuple(conversation.messages),
            tools=tuple(conversation.tools),
            variables=conversation.variables,
            max_new_tokens=self._output_tokens(request.most_tokens),
            sampling=request.sampling(),
            images=tuple(images),
            stop=request.stops(),
            guidance=grammar.guidance,
            alternatives=(request.top_logprobs or 0) if request.logprobs else None,
        )
        if request.top_logprobs is not None and not request.logprobs:
            raise invalid("top_logprobs wants logprobs to be true", "top_logprobs")
        answers = await self.ask(request, [question])
        schemas = {function.name: function.parameters or {} for function in offered(request)}
        return Chat(answers, form.calls, model.format, marks.begins if marks else None, schemas, grammar.left_out)

    async def complete(self, request: CompletionRequest) -> Chat:
        """Begins the answers to one or several prompts.

        Raises:
            ApiError: the request is wrong, or the model cannot answer it, see `ask`.
        """
        self.model(request.model)
        prompts: list[Any] = request.prompt if isinstance(request.prompt, list) else [request.prompt]
        if prompts and isinstance(prompts[0], int):
            prompts = [prompts]
        if not prompts:
            raise invalid("expected a prompt, got an empty list", "prompt")
        questions = [
            Question(
                prompt if isinstance(prompt, str) else tuple(prompt),
                max_new_tokens=self._output_tokens(16 if request.max_tokens is None else request.max_tokens),
                sampling=request.sampling(),
                stop=request.stops(),
                alternatives=request.logprobs,
                echo=request.echo or False,
            )
            for prompt in prompts
        ]
        return Chat(await self.ask(request, questions))

    async def ask(self, request: Shared, questions: list[Question]) -> Answers:
        """Begins the answers to a request's questions, as many to each as it asks for.

        Raises:
            ApiError: more answers are wanted than a request may have, the model cannot be loaded or gives no logprobs,
                or the queue is full.
        """
        name, choices, most = request.model, request.n or 1, self.settings.limits.choices
        if choices * len(questions) > most:
            raise invalid(
                f"expected n times the number of prompts to be {most} at most, got {choices * len(questions)}", "n"
            )
        asked = [_choice(question, index) for question in questions for index in range(choices)]
        if self.settings.logs_texts:
            log.info("%s: asked %s", name, [question.prompt for question in questions])
        answers = Answers(name, self._opened(name, questions), asked, self.settings, self.metrics)
        await answers.begin(self.settings.heartbeat_seconds if request.stream else None)
        return answers

    async def _opened(self, name: str, questions: list[Question]) -> ModelProcess:
        """The process of a model that can answer the questions.

        Raises:
            ApiError: it cannot be loaded, or gives no logprobs, which a question wants.
        """
        process = await self.catalogue.get(self.resolve(name))
        wants = any(question.alternatives is not None or question.echo for question in questions)
        if wants and not process.facts.gives_likelihoods:
            raise invalid(
                f"the model {name} is paged, and ORT GenAI's engine, which computes it, gives tokens and no logits: "
                "leave logprobs and echo out, or serve the model converted without --paged",
                "logprobs",
            )
        return process

    def _output_tokens(self, wanted: int | None) -> int | None:
        most = self.settings.limits.output_tokens
        return wanted if most is None else most if wanted is None else min(wanted, most)


def _choice(question: Question, index: int) -> Question:
    """The question with a separate seed for each choice: choices differ, and repeat if the request does."""
    seed = question.sampling.seed
    if index == 0 or seed is None:
        return question
    return replace(question, sampling=replace(question.sampling, seed=(seed + index) % 2**31))


def usage(answers: Answers, choices: int = 1) -> dict[str, Any]:
    """OpenAI's `usage` object of a request; a prompt's tokens count once for its `choices` answers."""
    finished = [answers.finished[index] for index in sorted(answers.finished)]
    prompts = finished[::choices]
    prompt_tokens = sum(item.prompt_tokens for item in prompts)
    new_tokens = sum(item.new_tokens for item in finished)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": new_tokens,
        "total_tokens": prompt_tokens + new_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(item.cached_tokens for item in prompts)},
    }
