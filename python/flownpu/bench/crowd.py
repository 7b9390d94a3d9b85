# SPDX-License-Identifier: Apache-2.0
"""Clients side by side: what a server of OpenAI's protocol gives each, and all together.

Prompts are random tokens, as `/v1/completions` takes them. The first half of each is the beginning of one text that all
have in common, as a system prompt is; the rest no other prompt has.
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

# Tokens below are often control ones; what prompts say does not change the work.
_FIRST_TOKEN = 8
# An answer that takes longer has failed.
_SECONDS = 600.0


@dataclass(frozen=True)
class Service:
    """Where a model is asked."""

    url: str
    """The address of its API, "/v1" included."""
    model: str
    """The name that the server knows it by."""


@dataclass(frozen=True)
class Crowd:
    """What is asked: each client asks one prompt of each length, one after the other, in an order of its own."""

    clients: int
    prompts: tuple[int, ...]
    """Tokens of each."""
    generate: int
    """Tokens of each answer, if no end of text comes before."""


@dataclass
class Answer:
    """One request. Times are seconds."""

    prompt: int
    """Tokens."""
    first: float = 0.0
    """From the request to the first piece of the answer."""
    between: list[float] = field(default_factory=list)
    """From each piece to the next."""
    tokens: int = 0
    """New ones, as the server counts them."""
    cached: int = 0
    """Tokens of the prompt that the server says it did not compute again."""
    failure: str = ""
    """What went wrong; empty: nothing."""


def check_client() -> None:
    """Raises MissingDependencyError unless there is a client of OpenAI's API."""
    require("openai", extra="bench", purpose="flownpu bench --serve")


def ask_all(service: Service, crowd: Crowd, *, vocabulary_size: int, seed: int) -> tuple[float, list[Answer]]:
    """Asks as the crowd does.

    Args:
        service: who is asked.
        crowd: what.
        vocabulary_size: tokens are below it.
        seed: of the prompts; with another one, all are other prompts.

    Returns:
        Seconds from the first request to the last answer, and the answers. What fails is in them.
    """
    return asyncio.run(_ask_all(service, prompts_of(crowd, vocabulary_size, seed), crowd.generate))


def first_model(url: str) -> str:
    """The name of the first model that a server has.

    Raises:
        FlowNPUError: it does not answer, or has none.
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
    """The prompts of each client, in its order."""
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
            if not last:  # of an answer that is empty, its end
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
    """OpenAI's client; its key is OPENAI_API_KEY's, and a server without one takes any."""
    return kind(base_url=url, api_key=os.environ.get("OPENAI_API_KEY") or "none", max_retries=0, timeout=timeout)
