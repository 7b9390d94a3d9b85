# SPDX-License-Identifier: Apache-2.0
"""llm: its models of OpenAI's API, with schemas, tools and streams."""

import json
from typing import Any

import llm
from llm.default_plugins.openai_models import Chat

from tests.serve.clients.scenario import ADDRESS, LONG, MODEL, PROMPT, SHORT, Echo, Order, first, order, run

model = Chat(MODEL, key="none", api_base=f"{ADDRESS}/v1", supports_schema=True, supports_tools=True)
model.key = "none"


def options(tokens: int) -> dict[str, Any]:
    return {"temperature": 0, "max_tokens": tokens}


def offered() -> Any:
    """Its API cannot demand a call."""
    tool = llm.Tool("order", "Orders something.", Order.model_json_schema(), order)
    return model.prompt(PROMPT, tools=[tool], **options(SHORT)).text()


def structured() -> Any:
    return json.loads(model.prompt(PROMPT, schema=Order, **options(LONG)).text())


def stream() -> Any:
    return "".join(model.prompt(PROMPT, **options(SHORT)))


def leave() -> Any:
    pieces = iter(model.prompt(PROMPT, schema=Echo, **options(LONG)))
    read = first(pieces)
    pieces.close()
    return len(read)


run(offered=offered, structured=structured, stream=stream, leave=leave)
