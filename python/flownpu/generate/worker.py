# SPDX-License-Identifier: Apache-2.0
"""The interface between a server and a model: requests, the events that answer them, and the worker that computes them.

A worker owns a model and one thread; only that thread calls GenAI's generators or its engine. Requests may come from
any thread, and their events are delivered on the worker's. Prompts are written and tokenised by the caller, with the
`LanguageModel`'s tokenizer.
"""

import queue
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from flownpu.errors import FlowNPUError
from flownpu.generate.guidance import Guidance
from flownpu.generate.language_model import LanguageModel, Sampling
from flownpu.generate.tokenizer import Tokens

if TYPE_CHECKING:
    from flownpu.generate.images import PreparedImage

FinishReason = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True, eq=False)
class Request:
    """A request for one answer. Requests are compared by identity."""

    tokens: Tokens
    """int32 [tokens]: the prompt, at least one token."""
    max_new_tokens: int
    """At least 1, or with `echo` 0; prompt and new tokens together must fit in the worker's context."""
    sampling: Sampling = field(default_factory=Sampling)
    images: "tuple[PreparedImage, ...]" = ()
    """One for each mark in the prompt."""
    stop: tuple[str, ...] = ()
    """Texts that end the answer. Neither they nor what follows them is delivered; text that may be the beginning of one
    is held back until it is clear."""
    guidance: Guidance | None = None
    alternatives: int | None = None
    """How many of the likeliest tokens are delivered beside each token, with their log-probabilities; None: not even
    the token's own. Only for a worker that `gives_likelihoods`."""
    echo: bool = False
    """Whether the prompt is delivered before the answer. With `alternatives` its tokens are computed one by one, since
    graphs yield the logits of a prompt's last token only. Only for a worker that `gives_likelihoods`."""


@dataclass(frozen=True)
class Likelihood:
    """The natural logarithm of a token's probability before penalties, temperature, top-k, top-p and guidance."""

    token: int
    text: str
    """See `Tokenizer.text_of`."""
    data: bytes
    """The bytes that the token adds to the answer, see `Tokenizer.bytes_of`."""
    logarithm: float | None
    """None: it is the prompt's first token, which has no probability."""


@dataclass(frozen=True)
class Started:
    """The request has left the queue: its prompt is being computed."""

    prompt_tokens: int


@dataclass(frozen=True)
class Piece:
    """The text that new tokens add; it may be empty while a character or a stop text is incomplete."""

    text: str
    tokens: int
    """How many new tokens the text is from; 0: it is the prompt's."""
    likelihoods: tuple[tuple[Likelihood, ...], ...] = ()
    """For each of these tokens its own likelihood, then those of the alternatives, the likeliest first; empty if they
    were not asked for."""


@dataclass(frozen=True)
class Finished:
    """The last event of an answer."""

    reason: FinishReason
    """"stop": the model or a stop text ended it; "length": `max_new_tokens` is reached, or the context is full."""
    prompt_tokens: int
    cached_tokens: int
    """Tokens of the prompt that were not computed again."""
    new_tokens: int
    """Includes the token with which the model ended the answer, if it did."""
    stop_text: str = ""
    """The stop text that ended the answer; empty: none did."""


@dataclass(frozen=True)
class Failed:
    """The last event of a request that failed, before or during its answer.

    A `FlowNPUError` is the request's fault, and its message is for the client. Any other error is the server's fault.
    """

    error: Exception


Event = Started | Piece | Finished | Failed
Deliver = Callable[[Event], None]
"""Called on the worker's thread: must return at once, and raise nothing."""


class Worker(ABC):
    """A model that answers requests, on a thread of its own.

    `submit`, `cancel` and `close` may be called from any thread, everything else from the worker's only.
    """

    model: LanguageModel
    """The model; other threads may use its tokenizer and chat template while the worker computes."""
    context_length: int
    """Most tokens of a prompt and its answer together."""
    slots: int
    """Requests that are computed at the same time; further ones wait, first come, first served."""
    gives_likelihoods: bool
    _thread: threading.Thread

    def __init__(self, model: LanguageModel) -> None:
        self.model = model
        self._waiting: deque[tuple[Request, Deliver]] = deque()
        """Requests that have come and not begun, in the order in which they came."""
        self._queue: queue.SimpleQueue[tuple[Request, Deliver] | Request | None] = queue.SimpleQueue()
        self._closed = False
        self._lock = threading.Lock()  # so that nothing follows the None of `close` in the queue

    def submit(self, request: Request, deliver: Deliver) -> None:
        """Returns at once. `deliver` gets at most one Started, any number of Pieces, then one Finished or Failed.

        A request that fails does not affect others.

        Raises:
            FlowNPUError: the worker is closed.
        """
        with self._lock:
            if self._closed:
                raise FlowNPUError("the model is being closed: send the request again")
            self._queue.put((request, deliver))

    def cancel(self, request: Request) -> None:
        """Ends a request at the next step, with Finished("cancelled"); does nothing if it has ended."""
        self._queue.put(request)

    def close(self) -> None:
        """Cancels all requests, and frees the model's memory; returns when that is done."""
        with self._lock:
            self._closed = True
            self._queue.put(None)
        self._thread.join()

    @abstractmethod
    def _cancel(self, request: Request) -> None:
        """Ends a cancelled request, if it has begun."""

    def _take_requests(self, *, idle: bool) -> bool:
        """Takes new requests into `_waiting`; cancelled ones that wait there end at once.

        Args:
            idle: whether there is nothing to compute: then, if nothing waits either, blocks until something comes.

        Returns:
            False after `close`, else True.
        """
        idle = idle and not self._waiting
        while True:
            try:
                message = self._queue.get(block=idle)
            except queue.Empty:
                return True
            idle = False
            if message is None:
                return False
            if not isinstance(message, Request):
                self._waiting.append(message)
                continue
            for waiting in [waiting for waiting in self._waiting if waiting[0] is message]:
                self._waiting.remove(waiting)
                _end(*waiting)
            self._cancel(message)

    def _end_waiting(self) -> None:
        """Ends requests that have not begun."""
        while self._waiting:
            _end(*self._waiting.popleft())


def _end(request: Request, deliver: Deliver) -> None:
    deliver(Finished("cancelled", len(request.tokens), 0, 0))
