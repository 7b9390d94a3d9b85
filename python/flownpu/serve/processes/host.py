# SPDX-License-Identifier: Apache-2.0
"""The process of one model: `python -m flownpu.serve.processes.host`, started by `ModelProcess`.

GenAI holds Python's lock while it computes, for seconds with a long prompt: a server in the same process could not even
answer /health meanwhile. And a crash here ends one model's requests instead of the server.

The process receives a `ModelSettings`, then (number, Question) to answer or (number, None) to cancel. It sends a
`ModelFacts` or an exception, then (number, Event). It ends when the connection does.
"""

import os
import signal
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from multiprocessing.connection import Connection
from threading import Lock
from typing import Any

import numpy as np

from flownpu.errors import ContextLengthError, FlowNPUError
from flownpu.generate.engine_worker import EngineWorker
from flownpu.generate.generator_worker import GeneratorWorker
from flownpu.generate.language_model import LanguageModel, Sampling
from flownpu.generate.tokenizer import Tokens
from flownpu.generate.worker import Event, Failed, Finished, Request, Worker
from flownpu.model.folder import read_genai_config
from flownpu.serve.processes.protocol import ModelFacts, ModelSettings, Question
from flownpu.system import connect_to_parent

CHARACTERS, SOME_CHARACTERS = 64, 4 * 2**20
"""Most characters of a prompt: so many for each token of the context, or so many for any. A longer one is refused
before it is cut into tokens, which takes some hundred bytes for each; languages have one to six characters a token."""
PROMPTS = 4
"""Prompts that are written at the same time: chat templates and tokenizers take milliseconds, and a template that takes
seconds lets others pass."""


def open_worker(settings: ModelSettings) -> Worker:
    """Opens a model and starts the worker that computes its answers.

    Raises:
        FlowNPUError, RuntimeError: the model cannot be opened, see `LanguageModel`.
    """
    model = LanguageModel(
        settings.folder,
        provider=settings.provider,
        options=settings.options,
        threads=settings.threads,
        speculation=settings.speculation,
        allow_control_tokens=settings.allow_control_tokens,
    )
    if model.dynamic_batching is not None:
        return EngineWorker(model, context=settings.context)
    return GeneratorWorker(model, context=settings.context, slots=settings.slots)


class _Host:
    """Answers the questions that come over a connection."""

    def __init__(self, connection: Connection, worker: Worker) -> None:
        self._connection = connection
        self._worker = worker
        self._requests: dict[int, Request | None] = {}
        """Requests that have not ended, by number; None while the prompt is written."""
        self._cancelled: set[int] = set()
        """Numbers of requests that were cancelled while their prompt was written."""
        self._lock = Lock()  # guards these and sending: other threads send, too
        self._prompts = ThreadPoolExecutor(PROMPTS, "prompt")

    def run(self) -> None:
        """Receives questions until the connection ends."""
        while True:
            try:
                number, question = self._connection.recv()
            except (EOFError, OSError):
                break
            if question is None:
                self._cancel(number)
                continue
            with self._lock:
                self._requests[number] = None
            self._prompts.submit(self._submit, number, question)
        self._prompts.shutdown(cancel_futures=True)
        self._worker.close()

    def _submit(self, number: int, question: Question) -> None:
        try:
            request = _request(question, self._worker)
            if question.only_counts:
                self._send(number, Finished("length", len(request.tokens), 0, 0))
                return
            with self._lock:
                dropped = number in self._cancelled
                if not dropped:
                    self._requests[number] = request
                    self._worker.submit(request, lambda event: self._send(number, event))
            if dropped:
                self._send(number, Finished("cancelled", len(request.tokens), 0, 0))
        except Exception as error:  # noqa: BLE001 whatever it is, it ends this request and no other
            self._send(number, Failed(error))

    def _cancel(self, number: int) -> None:
        with self._lock:
            request = self._requests.get(number)
            if request is None and number in self._requests:
                self._cancelled.add(number)
        if request is not None:
            self._worker.cancel(request)

    def _send(self, number: int, event: Event) -> None:
        if isinstance(event, Failed) and not isinstance(event.error, FlowNPUError):
            # Any other exception might not survive pickling.
            event = Failed(RuntimeError(f"{type(event.error).__name__}: {event.error}"))
        with self._lock:
            if isinstance(event, Finished | Failed):
                self._requests.pop(number, None)
                self._cancelled.discard(number)
            try:
                self._connection.send((number, event))
            except OSError:
                return  # the server is gone; `run` ends by itself


def _characters(value: Any) -> int:
    """The characters of all texts in a value of lists and objects."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(map(_characters, value.values()))
    if isinstance(value, list | tuple) and not (value and isinstance(value[0], int)):
        return sum(map(_characters, value))
    return 0


def _request(question: Question, worker: Worker) -> Request:
    """A question as a request in tokens.

    Raises:
        FlowNPUError: the prompt is empty or too long, has unknown tokens, or the chat template does not take it.
    """
    prompt = question.prompt
    # A turn has at least one token, and a template may take long for many turns.
    if len(prompt) > worker.context_length and not isinstance(prompt, str) and not isinstance(prompt[0], int):
        raise ContextLengthError(
            f"the conversation has {len(prompt)} turns, and the context holds {worker.context_length} tokens, the "
            "answer included: shorten the conversation"
        )
    most_characters = max(CHARACTERS * worker.context_length, SOME_CHARACTERS)
    if (characters := _characters([question.prompt, question.tools])) > most_characters:
        raise ContextLengthError(
            f"the prompt is {characters} characters long and the context holds {worker.context_length} tokens: shorten "
            f"it to {most_characters} characters at most"
        )
    tokens = _tokens(question, worker.model)
    room = worker.context_length - len(tokens)
    if not len(tokens):
        raise FlowNPUError("the prompt is empty: expected some text")
    most = room if question.max_new_tokens is None else min(question.max_new_tokens, room)
    if room < (question.max_new_tokens != 0) and not question.only_counts:
        raise ContextLengthError(
            f"the prompt is {len(tokens)} tokens long and the context holds {worker.context_length}, the answer "
            "included: shorten the prompt"
        )
    return Request(
        tokens,
        max(most, 0),
        _sampling(question.sampling, worker.model.vocabulary_size),
        question.images,
        question.stop,
        question.guidance,
        question.alternatives,
        question.echo,
    )


def _tokens(question: Question, model: LanguageModel) -> Tokens:
    prompt: Any = question.prompt
    if isinstance(prompt, str):
        return model.tokens_of_text(prompt)
    if prompt and isinstance(prompt[0], int):
        _check_tokens("the prompt", prompt, model.vocabulary_size)
        return np.array(prompt, dtype=np.int32)
    if not model.has_chat_template:
        return model.tokens_of_conversation(prompt)
    return model.tokens_of_messages(prompt, question.tools, question.variables)


def _sampling(sampling: Sampling, vocabulary: int) -> Sampling:
    """The sampling as GenAI takes it: if there are fewer than k tokens, all of them are the k likeliest.

    Raises:
        FlowNPUError: a biased token is unknown.
    """
    _check_tokens("logit_bias", (token for token, _ in sampling.penalties.bias), vocabulary)
    return sampling if sampling.top_k is None else replace(sampling, top_k=min(sampling.top_k, vocabulary))


def _check_tokens(place: str, tokens: Iterable[int], vocabulary: int) -> None:
    for token in tokens:
        if not 0 <= token < vocabulary:
            raise FlowNPUError(f"{place}: expected tokens from 0 to {vocabulary - 1}, got {token}")


def main() -> None:
    """Runs until the connection ends."""
    # Ctrl-C and a service manager's SIGTERM reach every process of a group, but the server decides when this one ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    connection = connect_to_parent()
    try:
        settings = connection.recv()
        read_genai_config(settings.folder)
        worker = open_worker(settings)
    except EOFError:
        return
    except Exception as error:  # noqa: BLE001 whatever it is, the server reports it
        connection.send(error if isinstance(error, FlowNPUError) else RuntimeError(str(error)))
        return
    model = worker.model
    connection.send(
        ModelFacts(
            worker.context_length,
            worker.slots,
            worker.gives_likelihoods,
            model.takes_images,
            model.has_chat_template,
            str(model.placement["summary"]),
            model.load_seconds,
        )
    )
    _Host(connection, worker).run()


if __name__ == "__main__":
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    main()
