# SPDX-License-Identifier: Apache-2.0
"""Valid bodies of requests, for each route that takes prompts."""

import base64
import io
import struct
import zlib
from functools import cache
from random import Random
from typing import Any

from PIL import Image

from tests.fuzz.server import values

# Names of the campaign's models: one with slots, a paged one, one that takes images, and one that embeds.
SLOTS, PAGED, SEEING = MODELS = ("topics", "paged", "seeing")
EMBEDDING = "embedding"
CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MESSAGES = "/v1/messages"
OLLAMA_CHAT, OLLAMA_GENERATE = "/api/chat", "/api/generate"
EMBEDDINGS = ("/v1/embeddings", "/api/embed")
ROUTES = (CHAT, COMPLETIONS, RESPONSES, MESSAGES, OLLAMA_CHAT, OLLAMA_GENERATE)
WITH_SCHEMA = (CHAT, RESPONSES, MESSAGES, OLLAMA_CHAT, OLLAMA_GENERATE)
WITH_TOOLS = (CHAT, RESPONSES, MESSAGES, OLLAMA_CHAT)
_QUESTIONS = ("Tell me about loops.", "What are strings?", "Describe exceptions.", "Tell me about classes.")


def plain(random: Random, path: str, text: str | None = None, tokens: int | None = None) -> dict[str, Any]:
    """A question, or a text in its place; the answer has some tokens, or `tokens`."""
    model = random.choice((SLOTS, PAGED))
    content = random.choice(_QUESTIONS) if text is None else text
    most = random.randint(1, 24) if tokens is None else tokens
    temperature = random.choice((0, 0, 0.7, 2))
    document: dict[str, Any] = {"model": model, "stream": random.random() < 0.5}
    if path.startswith("/api/"):
        document["options"] = {"num_predict": most, "temperature": temperature}
        if path == OLLAMA_GENERATE:
            return document | {"prompt": content or "x", "raw": random.random() < 0.3}
        return document | {"messages": _messages(random, content, text)}
    document["temperature"] = temperature
    if path == RESPONSES:
        return document | {"input": content, "max_output_tokens": most, **({"instructions": text} if text else {})}
    document["max_tokens"] = most
    if path == MESSAGES:
        document["temperature"] = min(temperature, 1)  # Anthropic's bound
        document |= {"stop_sequences": [text[:20]], "system": text} if text else {}
    if path == COMPLETIONS:
        return document | {"prompt": content}
    if path != MESSAGES and text and random.random() < 0.3:
        document |= {"stop": [text[:20]], "user": text}
    return document | {"messages": _messages(random, content, text)}


def _messages(random: Random, content: str, text: str | None) -> list[dict[str, Any]]:
    messages = [{"role": "user", "content": content}]
    if random.random() < 0.3:
        earlier = "I see." if text is None else text
        messages = [{"role": "user", "content": "Hello."}, {"role": "assistant", "content": earlier}, *messages]
    if random.random() < 0.3:
        messages.insert(0, {"role": "system", "content": "Be brief." if text is None else text})
    return messages


def with_schema(random: Random, path: str, schema: Any) -> dict[str, Any]:
    """A question whose answer is JSON of a schema."""
    document = plain(random, path, tokens=random.choice((8, 60)))
    document.pop("raw", None)
    if path.startswith("/api/"):
        return document | {"format": schema}
    if path == RESPONSES:
        return document | {"text": {"format": {"type": "json_schema", "name": "answer", "schema": schema}}}
    if path == MESSAGES:
        return document | {"output_config": {"format": {"type": "json_schema", "schema": schema}}}
    return document | {"response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}}


def with_tools(random: Random, path: str, schema: Any) -> dict[str, Any]:
    """A question with tools: one with these parameters, and one without any."""
    document = plain(random, path, tokens=random.choice((8, 60)))
    functions: list[dict[str, Any]] = [
        {"name": "find", "description": "Finds it.", "parameters": schema},
        {"name": "stop"},
    ]
    if path == RESPONSES:
        tools: list[Any] = [{"type": "function", **function} for function in functions]
        return document | {"tools": tools, "tool_choice": random.choice(("auto", "required"))}
    if path == MESSAGES:
        tools = [{"name": "find", "input_schema": schema}, {"name": "stop", "input_schema": {"type": "object"}}]
        chosen = random.choice(({"type": "auto"}, {"type": "any"}, {"type": "tool", "name": "find"}, {"type": "none"}))
        return document | {"tools": tools, "tool_choice": chosen}
    tools = [{"type": "function", "function": function} for function in functions]
    if path == OLLAMA_CHAT:
        return document | {"tools": tools}
    named = {"type": "function", "function": {"name": "find"}}
    return document | {"tools": tools, "tool_choice": random.choice(("auto", "required", named, "none"))}


def with_images(random: Random) -> dict[str, Any]:
    """A question about a picture, which is valid, damaged, or no picture at all."""
    right = _picture("PNG", 64)
    files = (
        right, right, right + right, right[: random.randint(0, len(right))], _flipped(random, right), b"", b"no",
        _immense(60_000), _immense(2**31 - 1), b"<svg xmlns='http://www.w3.org/2000/svg'/>", _picture("GIF", 16),
        _picture("JPEG", 200), _picture("TIFF", 16),
    )  # fmt: skip
    file = random.choice(files)
    url = f"data:image/{random.choice(('png', 'jpeg', '*', 'x'))};base64,{base64.b64encode(file).decode()}"
    url = random.choice(
        (url,) * 8 + (url[:-3], url.replace("base64", ""), "file:///etc/passwd", values.text(random, 50))
    )
    parts = [{"type": "image_url", "image_url": {"url": url}}] * random.choice((1, 1, 1, 2, 20))
    content = [*parts, {"type": "text", "text": "What is this?"}]
    model = random.choice((SEEING, SEEING, SLOTS))
    return {"model": model, "max_tokens": 4, "temperature": 0, "messages": [{"role": "user", "content": content}]}


@cache
def _picture(form: str, size: int) -> bytes:
    file = io.BytesIO()
    Image.linear_gradient("L").resize((size, size)).convert("RGB").save(file, form)
    return file.getvalue()


def _flipped(random: Random, file: bytes) -> bytes:
    changed = bytearray(file)
    for _ in range(random.randint(1, 5)):
        changed[random.randrange(len(changed))] ^= 1 << random.randrange(8)
    return bytes(changed)


PICTURE = base64.b64encode(_picture("PNG", 64)).decode()
"""A picture that every model that takes images can read, in base64."""


@cache
def _immense(side: int) -> bytes:
    """A PNG file of some bytes whose header says that it has side^2 pixels."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    pixels = zlib.compress(bytes(10_000_000))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")
