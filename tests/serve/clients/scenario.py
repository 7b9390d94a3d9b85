# SPDX-License-Identifier: Apache-2.0
"""The tasks of each Python client. Its script runs in the client's own environment and knows only this file.

A script's results are one JSON object on stdout, by the names of its scenarios.
"""

# No postponed annotations: Ollama's client reads those of `order`.
import json
import sys
import traceback
from collections.abc import Callable, Iterable
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

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
    """The person who orders."""

    name: Literal["Ada", "Grace"]
    home: Address


class Item(Strict):
    """One thing of an order."""

    name: Literal["bread", "salt"]
    amount: int = Field(ge=1, le=9)
    sent_to: Address | None = None


class Order(Strict):
    """An order: classes in classes, which become $defs and $ref."""

    customer: Person
    items: list[Item] = Field(min_length=1, max_length=2)


class Echo(Strict):
    """An answer that takes long to write, so that a client can leave in the middle of it."""

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
    """Runs scenarios and prints their results; a failed one has {"error": its message}."""
    results = {}
    for name, play in scenarios.items():
        try:
            results[name] = play()
        except Exception as error:  # noqa: BLE001 whatever it is, the test says it
            traceback.print_exc()
            results[name] = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps(results))
