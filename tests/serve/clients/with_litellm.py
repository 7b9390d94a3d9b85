# SPDX-License-Identifier: Apache-2.0
"""litellm, by its providers of OpenAI's API and of both of Ollama's."""

import json
from typing import Any

import litellm

from tests.serve.clients.scenario import ADDRESS, ECHO, LONG, MODEL, PROMPT, SHORT, TOOL, Order, first, run

BASES = {"openai": f"{ADDRESS}/v1", "ollama": ADDRESS, "ollama_chat": ADDRESS}


def ask(provider: str, tokens: int = LONG, **fields: Any) -> Any:
    asked = {
        "messages": [{"role": "user", "content": PROMPT}],
        "temperature": 0,
        "max_tokens": tokens,
        "num_retries": 0,
    }
    return litellm.completion(f"{provider}/{MODEL}", api_base=BASES[provider], api_key="none", **asked, **fields)


def tool() -> Any:
    choice = {"type": "function", "function": {"name": "order"}}
    (call,) = ask("openai", tools=[TOOL], tool_choice=choice).choices[0].message.tool_calls
    return {"arguments": json.loads(call.function.arguments)}


def offered() -> Any:
    """Ollama's API cannot demand a call."""
    return ask("ollama_chat", SHORT, tools=[TOOL]).choices[0].message.content


def structured() -> Any:
    return [json.loads(ask(provider, response_format=Order).choices[0].message.content) for provider in BASES]


def stream() -> Any:
    texts = []
    for provider in BASES:
        chunks = ask(provider, SHORT, stream=True)
        texts.append("".join(chunk.choices[0].delta.content or "" for chunk in chunks))
    return texts


def leave() -> Any:
    chunks = ask("openai", response_format=ECHO, stream=True)
    read = first(chunks)
    chunks.completion_stream.close()
    return len(read)


run(tool=tool, offered=offered, structured=structured, stream=stream, leave=leave)
