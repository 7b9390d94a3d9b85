# SPDX-License-Identifier: Apache-2.0
"""What each client of Python is asked to do; its script runs in the client's own environment and knows only this.

A script's results are one JSON object on stdout: those of its scenarios by name, and the hosts that it tried to reach
beside the loopback address.
"""

# No postponed annotations: Ollama's client reads those of `order`.
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterable
from typing import Any, Literal

# Before a client is imported: none may report its use, nor fetch prices, models or tokenizers.
os.environ |= {
    "ANONYMIZED_TELEMETRY": "false",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "LANGCHAIN_TRACING_V2": "false",
    "LANGSMITH_TRACING": "false",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
    "OTEL_SDK_DISABLED": "true",
}

_reached: list[str] = []


def _only_loopback(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "socket.getaddrinfo":
        host = arguments[0]
    elif event == "socket.connect" and isinstance(arguments[1], tuple):
        host = arguments[1][0]
    else:
        return
    host = host.decode() if isinstance(host, bytes) else host
    if host not in {None, "localhost", "127.0.0.1", "::1"}:
        _reached.append(str(host))
        raise OSError(f"a client tried to reach {host}")


sys.addaudithook(_only_loopback)

from pydantic import BaseModel, ConfigDict, Field  # noqa: E402 after the hook

ADDRESS = sys.argv[1] if len(sys.argv) > 1 else ""
"""The server's, without a path."""
MODEL = "topics"
PROMPT = "Tell me about loops."
SHORT, LONG = 24, 900
"""Most tokens of an answer in words, and of JSON."""
LEFT_AFTER = 3
"""Pieces after which a client leaves a stream."""


class Strict(BaseModel):
    """Has no other fields than its own, and says so in its schema."""

    model_config = ConfigDict(extra="forbid")


class Address(Strict):
    """Where somebody lives."""

    city: Literal["Ulm", "Köln"]
    number: int = Field(ge=1, le=99)


class Person(Strict):
    """Who orders."""

    name: Literal["Ada", "Grace"]
    home: Address


class Item(Strict):
    """What is ordered."""

    name: Literal["bread", "salt"]
    amount: int = Field(ge=1, le=9)
    sent_to: Address | None = None


class Order(Strict):
    """An order: classes in classes, which become $defs and $ref."""

    customer: Person
    items: list[Item] = Field(min_length=1, max_length=2)


class Echo(Strict):
    """What takes long to write, so that a client can leave in the middle of it."""

    words: list[Literal["loop"]] = Field(min_length=150, max_length=200)


ECHO = {"type": "json_schema", "json_schema": {"name": "Echo", "schema": Echo.model_json_schema(), "strict": True}}


def order(customer: Person, items: list[Item]) -> str:
    """Orders something.

    Args:
        customer: who orders.
        items: what is ordered.
    """
    return f"{len(items)} things for {customer.name}."


TOOL = {
    "type": "function",
    "function": {"name": "order", "description": "Orders something.", "parameters": Order.model_json_schema()},
}


def first(stream: Iterable[Any]) -> list[Any]:
    """The pieces that are read before the client leaves."""
    pieces = []
    for piece in stream:
        pieces.append(piece)
        if len(pieces) == LEFT_AFTER:
            break
    return pieces


def run(**scenarios: Callable[[], Any]) -> None:
    """Runs scenarios and prints their results; one that fails has {"error": what it says}."""
    results = {}
    for name, play in scenarios.items():
        try:
            results[name] = play()
        except Exception as error:  # noqa: BLE001 whatever it is, the test says it
            traceback.print_exc()
            results[name] = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps({"results": results, "reached": _reached}))
