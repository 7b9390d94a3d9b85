# SPDX-License-Identifier: Apache-2.0
"""Asks servers of OpenAI's API with many clients at once, in turn: their throughput and the clients' waiting.

    flownpu serve gemma3-1b-paged --port 8000 --slots 32 --queue 32
    python -m benchmarks.engines.servers flownpu=http://127.0.0.1:8000/v1 other=http://127.0.0.1:8001/v1

Each client sends a prompt of every length, when the one before is answered. Prompts are random token ids for
`/v1/completions`; the first half of each is the beginning of one text that all clients share, like a system prompt.
"""

import asyncio
import os
import time
from dataclasses import dataclass, field
from typing import Annotated, Any

import numpy as np
import openai
import typer
from rich.console import Console
from rich.table import Table

# Smallest random token: lower ones are often control tokens. The text of a prompt does not change the work.
_FIRST_TOKEN = 8
_PERCENTILES = (50, 95)


@dataclass
class Answers:
    """The answers to all clients of one server in all rounds; times are seconds."""

    first: list[float] = field(default_factory=list)
    """From each request to the first piece of its answer."""
    between: list[float] = field(default_factory=list)
    """From each piece to the next."""
    rates: list[float] = field(default_factory=list)
    """New tokens per second of all clients together, in each round."""
    failures: list[str] = field(default_factory=list)

    def row(self) -> list[str]:
        """The cells of the table, times in milliseconds."""
        times = [
            f"{1e3 * float(np.percentile(values, p)):.0f}" if values else ""
            for values in (self.first, self.between)
            for p in _PERCENTILES
        ]
        return [f"{np.median(self.rates):.1f}", *times, str(len(self.failures)), *self.failures[:1]]


def prompts_of(clients: int, lengths: list[int], vocabulary: int, seed: int) -> list[list[list[int]]]:
    """The prompts of each client, token ids in the order in which it sends them; another seed gives all others."""
    random = np.random.default_rng(seed)
    common = random.integers(_FIRST_TOKEN, vocabulary, max(lengths) // 2)

    def prompt(length: int) -> list[int]:
        own = random.integers(_FIRST_TOKEN, vocabulary, length - length // 2)
        return [int(token) for token in np.concatenate([common[: length // 2], own])]

    return [[prompt(int(length)) for length in random.permutation(lengths)] for _ in range(clients)]


async def ask_all(url: str, prompts: list[list[list[int]]], generate: int, answers: Answers) -> None:
    """Sends the prompts of all clients to one server and adds its answers."""
    key = os.environ.get("OPENAI_API_KEY") or "none"
    async with openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0, timeout=600) as client:
        model = (await client.models.list()).data[0].id

        async def ask_in_turn(own: list[list[int]]) -> int:
            return sum([await _ask(client, model, prompt, generate, answers) for prompt in own])

        started = time.perf_counter()
        tokens = sum(await asyncio.gather(*map(ask_in_turn, prompts)))
        answers.rates.append(tokens / (time.perf_counter() - started))


async def _ask(client: Any, model: str, prompt: list[int], generate: int, answers: Answers) -> int:
    """The number of new tokens of one answer, as the server counts them."""
    settings = {"temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
    last, tokens = time.perf_counter(), 0
    times: list[float] = []
    try:
        async for chunk in await client.completions.create(model=model, prompt=prompt, max_tokens=generate, **settings):
            if chunk.usage is not None:
                tokens = chunk.usage.completion_tokens
            if chunk.choices and (not times or chunk.choices[0].finish_reason is None):
                now = time.perf_counter()
                times.append(now - last)
                last = now
    except openai.OpenAIError as error:
        answers.failures.append(str(error) or type(error).__name__)
        return 0
    answers.first += times[:1]
    answers.between += times[1:]
    return tokens


def main(
    servers: Annotated[list[str], typer.Argument(metavar="NAME=URL...", help="Servers that run; URLs end in /v1.")],
    clients: Annotated[str, typer.Option(help="Numbers of clients; each is a measurement.")] = "1,2,4,8,16,32",
    prompt: Annotated[str, typer.Option(help="Tokens of the prompts that each client sends.")] = "64,256,1024",
    generate: Annotated[int, typer.Option(min=2, help="Most tokens of an answer.")] = 32,
    vocabulary: Annotated[int, typer.Option(help="Token ids are below it.")] = 32000,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds.")] = 3,
) -> None:
    """Prints a line for each server and number of clients; OPENAI_API_KEY is the key."""
    lengths = [int(part) for part in prompt.split(",")]
    columns = [f"{name}, p{p}, ms" for name in ("first token", "between tokens") for p in _PERCENTILES]
    table = Table("server", "clients", "new tokens/s", *columns, "failures", "")
    for count in map(int, clients.split(",")):
        found = {server: Answers() for server in servers}
        for seed in range(repeats):
            for server, answers in found.items():
                url = server.partition("=")[2]
                prompts = prompts_of(count, lengths, vocabulary, seed=count * repeats + seed)
                asyncio.run(ask_all(url, prompts, generate, answers))
        for server, answers in found.items():
            table.add_row(server.partition("=")[0], str(count), *answers.row())
    Console(width=160).print(table)


if __name__ == "__main__":
    typer.run(main)
