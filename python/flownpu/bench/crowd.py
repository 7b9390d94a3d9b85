# SPDX-License-Identifier: Apache-2.0
"""A crowd: clients that ask a server of OpenAI's API at the same time, and how fast they are answered.

Prompts are lists of random tokens for `/v1/completions`. The first half of each is the beginning of one text that all
prompts share, like a system prompt; the second half is its own.
"""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from flownpu.errors import FlowNPUError, require

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Tokens = NDArray[np.int64]

__all__ = ["Answer", "Crowd", "Service", "ask_all", "check_client", "first_model", "prompts_of"]

# Smallest random token: those below are often control tokens. What prompts say does not change the work.
_FIRST_TOKEN = 8
# Timeout of an answer.
_SECONDS = 600.0


@dataclass(frozen=True)
class Service:
    """A model on a server."""

    url: str
    """The address of the server's API, "/v1" included."""
    model: str
    """The model's name on the server."""


@dataclass(frozen=True)
class Crowd:
    """What is asked: each client asks one prompt of each length, one after the other, in an order of its own."""

    clients: int
    prompts: tuple[int, ...]
    """Lengths of the prompts in tokens."""
    generate: int
    """Most tokens of each answer; a token that ends the text may end it before."""


@dataclass
class Answer:
    """The answer to one request. Times are seconds."""

    prompt: int
    """Tokens of the prompt."""
    first: float = 0.0
    """From the request to the first piece of the answer."""
    between: list[float] = field(default_factory=list)
    """From each piece to the next."""
    tokens: int = 0
    """New tokens, as the server counts them."""
    cached: int = 0
    """Tokens of the prompt that the server took from its cache, as it says."""
    failure: str = ""
    """What went wrong; empty if nothing did."""


def check_client() -> None:
    """Raises MissingDependencyError unless the package openai is installed."""
    require("openai", extra="bench", purpose="flownpu bench --serve")


def ask_all(service: Service, crowd: Crowd, *, vocabulary_size: int, seed: int) -> tuple[float, list[Answer]]:
    """Asks a crowd's prompts and waits for all answers.

    Args:
        service: the model that is asked.
        crowd: clients, prompts and answers.
        vocabulary_size: tokens are below it.
        seed: seed of the random prompts; another seed gives entirely different prompts.

    Returns:
        Seconds from the first request to the last answer, and the answers; failed requests have `failure` set.
    """
    return asyncio.run(_ask_all(service, prompts_of(crowd, vocabulary_size, seed), crowd.generate))


def first_model(url: str) -> str:
    """The name of the first model that a server has.

    Raises:
        FlowNPUError: the server does not answer, or has no model.
    """
    openai = require("openai", extra="bench", purpose="flownpu bench --serve")
    try:
        with _client(openai.OpenAI, url, timeout=30) as client:
            names = [model.id for model in client.models.list()]
    except openai.OpenAIError as error:
        raise FlowNPUError(f"{url}/models: expected the models of a server of OpenAI's API, got {error}") from error
    if not names:
        raise FlowNPUError(f"{url} has no model")
    return str(names[0])


def prompts_of(crowd: Crowd, vocabulary_size: int, seed: int) -> list[list[Tokens]]:
    """The prompts of each client, in the order in which it asks them: int64 [length] each."""
    random = np.random.default_rng(seed)

    def draw(count: int) -> Tokens:
        return random.integers(_FIRST_TOKEN, vocabulary_size, count)

    common = draw(max(crowd.prompts) // 2)
    return [
        [
            np.concatenate([common[: length // 2], draw(length - length // 2)])
            for length in random.permutation(crowd.prompts)
        ]
        for _ in range(crowd.clients)
    ]


async def _ask_all(service: Service, prompts: list[list[Tokens]], generate: int) -> tuple[float, list[Answer]]:
    openai = require("openai", extra="bench", purpose="flownpu bench --serve")
    async with _client(openai.AsyncOpenAI, service.url, timeout=_SECONDS) as client:

        async def ask(own: list[Tokens]) -> list[Answer]:
            return [await _ask(client, openai.OpenAIError, service.model, prompt, generate) for prompt in own]

        started = time.perf_counter()
        answers = await asyncio.gather(*map(ask, prompts))
        seconds = time.perf_counter() - started
    return seconds, [answer for each in answers for answer in each]


async def _ask(client: Any, error_type: type[Exception], model: str, prompt: Tokens, generate: int) -> Answer:
    answer, last = Answer(len(prompt)), 0.0
    started = time.perf_counter()
    try:
        stream = await client.completions.create(
            model=model,
            prompt=prompt.tolist(),
            max_tokens=generate,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        async for chunk in stream:
            now = time.perf_counter()
            if chunk.usage is not None:
                answer.tokens = chunk.usage.completion_tokens
                details = getattr(chunk.usage, "prompt_tokens_details", None)
                answer.cached = (details.cached_tokens or 0) if details is not None else 0
            if not chunk.choices:
                continue
            if not last:  # the first piece; an empty answer has its end only
                answer.first = now - started
            elif chunk.choices[0].finish_reason is None:
                answer.between.append(now - last)
            last = now
    except error_type as error:
        answer.failure = str(error) or type(error).__name__
    else:
        if not last or not answer.tokens:
            answer.failure = "the stream has no piece of an answer, or no count of its tokens"
    return answer


def _client(kind: Any, url: str, *, timeout: float) -> Any:
    """OpenAI's client; its key is that of OPENAI_API_KEY, and servers that want none ignore it."""
    return kind(base_url=url, api_key=os.environ.get("OPENAI_API_KEY") or "none", max_retries=0, timeout=timeout)
