# SPDX-License-Identifier: Apache-2.0
"""The client of Ollama: a function of Python as a tool, a schema as format, and streams."""

from typing import Any

import ollama

from tests.serve.clients.scenario import ADDRESS, LONG, MODEL, PROMPT, SHORT, TOOL, Echo, Order, first, order, run

client = ollama.Client(host=ADDRESS)
MESSAGES = [{"role": "user", "content": PROMPT}]


def options(tokens: int) -> dict[str, Any]:
    return {"temperature": 0, "num_predict": tokens}


def offered() -> Any:
    """Ollama's API cannot demand a call."""
    texts = [
        client.chat(MODEL, MESSAGES, tools=tools, options=options(SHORT)).message.content for tools in ([TOOL], [order])
    ]
    assert texts[0] == texts[1]
    return texts[0]


def structured() -> Any:
    answer = client.chat(MODEL, MESSAGES, format=Order.model_json_schema(), options=options(LONG))
    return Order.model_validate_json(answer.message.content).model_dump(mode="json")


def stream() -> Any:
    parts = client.chat(MODEL, MESSAGES, options=options(SHORT), stream=True)
    return "".join(part.message.content for part in parts)


def leave() -> Any:
    parts = client.chat(MODEL, MESSAGES, format=Echo.model_json_schema(), options=options(LONG), stream=True)
    pieces = first(parts)
    parts.close()
    return len(pieces)


run(offered=offered, structured=structured, stream=stream, leave=leave)
