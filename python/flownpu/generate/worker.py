# SPDX-License-Identifier: Apache-2.0
"""The interface between a server and a model: requests, the events that answer them, and the worker that computes them.

A worker owns a model and one thread; only that thread calls GenAI's generators or its engine. Requests may come from
any thread, and their events are delivered on the worker's. Prompts are written and tokenised by the caller, with the
`LanguageModel`'s tokenizer.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

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
    """At least 1; prompt and new tokens together must fit in the worker's context."""
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


@dataclass(frozen=True)
class Likelihood:
    """The natural logarithm of a token's probability before penalties, temperature, top-k, top-p and guidance."""

    token: int
    text: str
    """See `Tokenizer.text_of`."""
    data: bytes
    """The bytes that the token adds to the answer, see `Tokenizer.bytes_of`."""
    logarithm: float


@dataclass(frozen=True)
class Started:
    """The request has left the queue: its prompt is being computed."""


@dataclass(frozen=True)
class Piece:
    """The text that new tokens add; it may be empty while a character or a stop text is incomplete."""

    text: str
    tokens: int
    """How many new tokens the text is from."""
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


@dataclass(frozen=True)
class Failed:
    """The last event of a request that failed, before or during its answer.

    A `FlowNPUError` is the fault of the request, and its message is for the client. Any other error is the server's.
    """

    error: Exception


Event = Started | Piece | Finished | Failed
Deliver = Callable[[Event], None]
"""Called on the worker's thread: must return at once, and raise nothing."""


class Worker(Protocol):
    """A model that answers requests. All methods may be called from any thread."""

    model: LanguageModel
    """The model; other threads may use its tokenizer and chat template while the worker computes."""
    context_length: int
    """Most tokens of a prompt and its answer together."""
    slots: int
    """Requests that are computed at the same time; further ones wait, first come, first served."""
    gives_likelihoods: bool

    def submit(self, request: Request, deliver: Deliver) -> None:
        """Returns at once. `deliver` gets at most one Started, any number of Pieces, then one Finished or Failed.

        A request that fails does not affect others.

        Raises:
            FlowNPUError: the worker is closed.
        """

    def cancel(self, request: Request) -> None:
        """Ends a request at the next step, with Finished("cancelled"); does nothing if it has ended."""

    def close(self) -> None:
        """Cancels all requests, and frees the model's memory; returns when that is done."""
