# SPDX-License-Identifier: Apache-2.0
"""What a server asks of a model: requests, the events that answer them, and the worker that computes them.

A worker owns a model and one thread; only that thread calls GenAI's generators or its engine. Requests come from any
thread, and their events go out from the worker's. Prompts are written and tokenised elsewhere, with the
`LanguageModel`'s own tokenizer.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

from flownpu.generate.language_model import LanguageModel, Sampling, Tokens

if TYPE_CHECKING:
    from flownpu.generate.images import PreparedImage

__all__ = [
    "Deliver",
    "Event",
    "Failed",
    "FinishReason",
    "Finished",
    "Guidance",
    "Likelihood",
    "Piece",
    "Request",
    "Started",
    "Worker",
]

FinishReason = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True)
class Guidance:
    """What the answer's text must be an instance of."""

    kind: Literal["json_schema", "regex", "lark_grammar"]
    """GenAI's name of it."""
    text: str


@dataclass(frozen=True, eq=False)
class Request:
    """One answer that is wanted. Two are the same only if they are the same object."""

    tokens: Tokens
    """int32 [tokens]: the prompt, at least one token."""
    max_new_tokens: int
    """At least 1; the prompt and these fit in the worker's context."""
    sampling: Sampling = field(default_factory=Sampling)
    images: "tuple[PreparedImage, ...]" = ()
    """One for each mark in the prompt."""
    stop: tuple[str, ...] = ()
    """Texts that end the answer. Neither they nor what follows them is delivered, nor any beginning of one that may
    still become one."""
    guidance: Guidance | None = None
    alternatives: int | None = None
    """How many of the likeliest tokens are told beside each token, with their log-probabilities; None: nor is the
    token's own. Only a worker that `gives_likelihoods` takes it."""


@dataclass(frozen=True)
class Likelihood:
    """The natural logarithm of a token's probability before temperature, top-k, top-p and guidance."""

    token: int
    text: str
    """What the token stands for by itself."""
    logarithm: float


@dataclass(frozen=True)
class Started:
    """The request has left the queue: its prompt is being computed."""


@dataclass(frozen=True)
class Piece:
    """The text that new tokens add; it may be empty while a character or a stop text is incomplete."""

    text: str
    tokens: int
    """How many new tokens this event is of."""
    likelihoods: tuple[tuple[Likelihood, ...], ...] = ()
    """For each of these tokens itself, then the alternatives with the likeliest first; if they were asked for."""


@dataclass(frozen=True)
class Finished:
    """The last event of an answer."""

    reason: FinishReason
    """"stop": the model or a stop text ended it; "length": `max_new_tokens`, or the context is full."""
    prompt_tokens: int
    cached_tokens: int
    """Those of the prompt that were not computed again."""
    new_tokens: int
    """With the token that ended the answer, if the model gave one."""


@dataclass(frozen=True)
class Failed:
    """The last event of a request without an answer, or without the rest of it.

    A `FlowNPUError` is the request's own fault, and its message is for who sent it. Anything else is the server's.
    """

    error: Exception


Event = Started | Piece | Finished | Failed
Deliver = Callable[[Event], None]
"""Called on the worker's thread: returns at once, and raises nothing."""


class Worker(Protocol):
    """A model that answers requests. All methods may be called from any thread."""

    model: LanguageModel
    """Opened; its tokenizer and chat template may be used by one other thread while the worker computes."""
    context_length: int
    """Tokens of a prompt and its answer together."""
    slots: int
    """Requests that are computed at the same time; further ones wait, the first come first."""
    gives_likelihoods: bool

    def submit(self, request: Request, deliver: Deliver) -> None:
        """Returns at once. `deliver` gets at most one Started, any number of Pieces, then one Finished or Failed.

        A request that fails harms no other.

        Raises:
            FlowNPUError: the worker is closed.
        """

    def cancel(self, request: Request) -> None:
        """Ends a request at the next step, with Finished("cancelled"); nothing if it has ended."""

    def close(self) -> None:
        """Ends what is running as `cancel` does, and gives the model's memory back; returns when that is done."""
