# SPDX-License-Identifier: Apache-2.0
"""The service behind the routes of all APIs: finds a request's model and begins its answers."""

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

from flownpu.generate.answer_format import AnswerFormat, Schemas, State
from flownpu.generate.worker import Finished, Likelihood, Piece
from flownpu.model.folder import is_embedding_folder, is_pipeline_folder
from flownpu.serve.answers import Answers
from flownpu.serve.catalogue import Catalogue
from flownpu.serve.chat_prompts import ChatModel
from flownpu.serve.embeddings import Embedder
from flownpu.serve.errors import ApiError, invalid, too_slow, unknown_model
from flownpu.serve.grammars.form import AnswerForm, offered
from flownpu.serve.grammars.process import GrammarProcess
from flownpu.serve.metrics import Metrics
from flownpu.serve.pictures import Painter
from flownpu.serve.processes.protocol import Question
from flownpu.serve.requests.openai import ChatRequest, CompletionRequest
from flownpu.serve.settings import ServerSettings
from flownpu.serve.tools import AnswerReader, CallFormat, MarkedReader, ToolCall

if TYPE_CHECKING:
    from flownpu.serve.in_process import InProcess

log = logging.getLogger(__name__)

Kind = TypeVar("Kind", Embedder, Painter)

UNENFORCED = "FlowNPU-Unenforced"
"""The response's header that tells which keywords of schemas the answer may violate."""
LISTED = 20
"""Most places of keywords in a response's header: servers and clients limit a header to some kilobytes."""
DECODING = 2
"""Conversations whose images are decoded at the same time; each image may take 400 MiB meanwhile."""


_ABILITIES = {
    ChatModel: ("generates texts", "/v1/chat/completions"),
    Embedder: ("embeds texts", "/v1/embeddings or /api/embed"),
    Painter: ("makes pictures", "/v1/images/generations"),
}
"""The ability of models of a kind, and the routes that ask for it."""


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
        if not self.unenforced:
            return {}
        more = len(self.unenforced) - LISTED
        return {UNENFORCED: ", ".join([*self.unenforced[:LISTED], *([f"and {more} more"] if more > 0 else [])])}

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


class Service:
    """The models of a server: those that generate texts are in `catalogue`, all others in `in_process`."""

    def __init__(self, settings: ServerSettings) -> None:
        self.settings = settings
        self.in_process: dict[str, InProcess[Any]] = {}
        for name, model in settings.models.items():
            if is_embedding_folder(model.folder):
                self.in_process[name] = Embedder(name, model, settings.limits)
            elif is_pipeline_folder(model.folder):
                self.in_process[name] = Painter(name, model, settings.limits)
        chats = {name: model for name, model in settings.models.items() if name not in self.in_process}
        self.catalogue = Catalogue(replace(settings, models=chats))
        self.grammars = GrammarProcess()
        self.metrics = Metrics()
        self._models = {name: ChatModel(model.folder) for name, model in chats.items()}
        self._decoding = asyncio.Semaphore(DECODING)

    def model(self, name: str) -> ChatModel:
        """A model that generates texts, as its folder describes it.

        Raises:
            ApiError: there is no model of that name, or it does something else.
        """
        if name not in self._models:
            raise self._unfit(name, ChatModel)
        return self._models[name]

    @property
    def names(self) -> list[str]:
        """All models' names, in the order in which they were given."""
        return list(self.settings.models)

    async def load_first(self) -> None:
        """Loads the model that was given first.

        Raises:
            ApiError: it cannot be loaded.
        """
        name = self.names[0]
        if name in self.in_process:
            await self.in_process[name].load()
        else:
            await self.catalogue.get(name)

    async def close(self) -> None:
        """Closes all models."""
        await self.catalogue.close()
        await self.grammars.close()

    def of_kind(self, name: str, kind: type[Kind]) -> Kind:
        """A model that is not a chat's, of this class.

        Raises:
            ApiError: there is no model of that name, or it does something else.
        """
        found = self.in_process.get(name)
        if not isinstance(found, kind):
            raise self._unfit(name, kind)
        return found

    def _unfit(self, name: str, wanted: type) -> ApiError:
        """The error that a model does something else than wanted, or that there is none of that name."""
        if name not in self.names:
            return unknown_model(name, self.names)
        kinds = {other: type({**self._models, **self.in_process}[other]) for other in self.names}
        does, route = _ABILITIES[kinds[name]]
        others = ", ".join(other for other, kind in kinds.items() if kind is wanted) or "none"
        asked = _ABILITIES[wanted][0].replace("s ", " ", 1)
        return invalid(f"the model {name} {does}: ask {route}. Of models that {asked} there is here: {others}", "model")

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
            max_new_tokens=self._output_tokens(request.max_completion_tokens or request.max_tokens),
            sampling=request.sampling(),
            images=tuple(images),
            stop=request.stops(),
            guidance=grammar.guidance,
            alternatives=(request.top_logprobs or 0) if request.logprobs else None,
        )
        if request.top_logprobs is not None and not request.logprobs:
            raise invalid("top_logprobs wants logprobs to be true", "top_logprobs")
        answers = await self.ask(request.model, [question], request.n or 1)
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
            )
            for prompt in prompts
        ]
        return Chat(await self.ask(request.model, questions, request.n or 1))

    async def ask(self, name: str, questions: list[Question], choices: int) -> Answers:
        """Begins `choices` answers to each question.

        Raises:
            ApiError: more answers are wanted than a request may have, the model cannot be loaded or gives no logprobs,
                or the queue is full.
        """
        most = self.settings.limits.choices
        if choices * len(questions) > most:
            raise invalid(
                f"expected n times the number of prompts to be {most} at most, got {choices * len(questions)}", "n"
            )
        process = await self.catalogue.get(name)
        if any(question.alternatives is not None for question in questions) and not process.facts.gives_likelihoods:
            raise invalid(
                f"the model {name} is paged, and ORT GenAI's engine, which computes it, gives tokens and no logits: "
                "leave logprobs out, or serve the model converted without --paged",
                "logprobs",
            )
        asked = [_choice(question, index) for question in questions for index in range(choices)]
        if self.settings.logs_texts:
            log.info("%s: asked %s", name, [question.prompt for question in questions])
        answers = Answers(name, process, asked, self.settings, self.metrics)
        await answers.begin()
        return answers

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
