# SPDX-License-Identifier: Apache-2.0
"""Well-behaved clients: each question has one answer, found while no other client asked."""

from __future__ import annotations

import asyncio
import time
import uuid
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from tests.fuzz.server import bodies, values
from tests.fuzz.server.answers import Answer, WrongFormError, answer_of
from tests.fuzz.server.exchange import Reply, Request, exchange

# Replaced by another text in each request: a schema with it is a new one, which no earlier request has made cheap.
_FRESH = "@fresh@"
_SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["for", "while"]}, "count": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["kind", "count"],
    "additionalProperties": False,
}
_LONGEST_WAIT = 2.0  # seconds, whatever Retry-After says: early repetitions are harder for the server


def questions() -> list[Request]:
    """Questions to every route and model that answers."""
    message = [{"role": "user", "content": "Tell me about loops."}]
    schema = {"type": "json_schema", "json_schema": {"name": "loop", "schema": {"title": _FRESH, **_SCHEMA}}}
    tools = [{"type": "function", "function": {"name": "find", "parameters": _SCHEMA}}]
    options = {"temperature": 0, "num_predict": 12}
    asked: list[tuple[str, dict[str, Any]]] = []
    for model in (bodies.SLOTS, bodies.PAGED):
        greedy = {"model": model, "temperature": 0, "max_tokens": 20}
        chat = greedy | {"messages": message}
        asked += [
            (bodies.CHAT, chat),
            (bodies.CHAT, chat | {"stream": True}),
            (bodies.CHAT, chat | {"response_format": schema, "max_tokens": 60}),
            (bodies.CHAT, chat | {"tools": tools, "tool_choice": "required", "max_tokens": 60}),
            (bodies.COMPLETIONS, greedy | {"prompt": "The expression list"}),
            (bodies.COMPLETIONS, greedy | {"prompt": 'The "for" statement is used to', "stream": True}),
            (bodies.OLLAMA_CHAT, {"model": model, "messages": message, "options": options}),
            (bodies.OLLAMA_GENERATE, {"model": model, "prompt": "Strings are", "raw": True, "options": options}),
            (
                bodies.RESPONSES,
                {"model": model, "input": "What are strings?", "temperature": 0, "max_output_tokens": 16},
            ),
        ]
    url = f"data:image/png;base64,{bodies.PICTURE}"
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is this?"}]
    picture = [{"role": "user", "content": content}]
    asked.append((bodies.CHAT, {"model": bodies.SEEING, "temperature": 0, "max_tokens": 12, "messages": picture}))
    headers = (("Content-Type", "application/json"),)
    return [Request("neighbour", "POST", path, headers, values.body(document)) for path, document in asked]


NONE = Answer()


@dataclass(frozen=True)
class Outcome:
    """A neighbour's answer. `fault` says what is wrong, and `refusals` counts the refusals before it."""

    reply: Reply | None
    seconds: float
    refusals: int = 0
    fault: str = ""
    answer: Answer = NONE


async def ask(port: int, request: Request, seconds: float) -> Outcome:
    """Asks until there is an answer, like clients that obey Retry-After."""
    begin, refusals, reply = time.monotonic(), 0, None

    def outcome(fault: str = "", answer: Answer = NONE) -> Outcome:
        return Outcome(reply, time.monotonic() - begin, refusals, fault, answer)

    try:
        async with asyncio.timeout(seconds):
            while True:
                body = request.body.replace(_FRESH.encode(), uuid.uuid4().hex.encode())
                reply = await exchange(port, replace(request, body=body), seconds)
                if reply.status not in {429, 503}:
                    break
                refusals += 1
                await asyncio.sleep(min(float(reply.headers.get("retry-after", "1")), _LONGEST_WAIT))
    except TimeoutError:
        return outcome(f"no answer within {seconds:.0f} s")
    if reply.status != 200 or not reply.whole:
        return outcome(f"status {reply.status}, {reply.body[:300].decode(errors='replace')}")
    try:
        answer = answer_of(request.path, reply)
    except WrongFormError as error:
        return outcome(str(error))
    return outcome(f"the answer ended with {answer.error}" if answer.error else "", answer)


@dataclass(frozen=True)
class Neighbours:
    """Questions and the answers that they have."""

    known: tuple[tuple[Request, Answer], ...]

    @classmethod
    async def alone(cls, port: int, asked: list[Request], seconds: float) -> Neighbours:
        """Asks each question while nobody else asks.

        Raises:
            RuntimeError: one has no answer, or another one when it is asked again.
        """
        known: dict[Request, Answer] = {}
        for request in [*asked, *asked]:
            outcome = await ask(port, request, seconds)
            if outcome.fault or known.setdefault(request, outcome.answer) != outcome.answer:
                told = outcome.fault or f"first {known[request]}, then {outcome.answer}"
                raise RuntimeError(f"expected one answer of {request.path} to {request.body!r}, got {told}")
        return cls(tuple(known.items()))

    async def ask_one(self, port: int, random: Random, seconds: float) -> tuple[Request, Outcome]:
        """Asks one of the questions, and compares the answer with what it was."""
        request, expected = random.choice(self.known)
        outcome = await ask(port, request, seconds)
        if not outcome.fault and outcome.answer != expected:
            outcome = replace(outcome, fault=f"expected {expected}, got {outcome.answer}")
        return request, outcome
