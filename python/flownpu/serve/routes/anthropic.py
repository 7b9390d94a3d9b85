# SPDX-License-Identifier: Apache-2.0
"""Anthropic's API: /v1/messages and /v1/messages/count_tokens."""

import asyncio
import json
import logging
import uuid
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from flownpu.serve.errors import ApiError
from flownpu.serve.requests.anthropic import CountRequest, MessagesRequest
from flownpu.serve.requests.openai import ChatRequest
from flownpu.serve.routes.json_route import JsonRoute
from flownpu.serve.service import Chat, Delta, End, Service, left_out, usage
from flownpu.serve.streams import event_stream, unless_gone
from flownpu.serve.template_variables import knows_thinking

log = logging.getLogger(__name__)


def anthropic_routes(service: Service) -> APIRouter:
    """The routes to a server's models."""
    router = APIRouter(route_class=JsonRoute, prefix="/v1/messages")

    @router.post("")
    async def messages(request: MessagesRequest, connection: Request) -> Response:
        asked, missing = await asyncio.to_thread(_for_model, service, request)
        chat = await unless_gone(connection, service.chat(asked))
        headers = chat.headers | left_out(missing)
        told = events(chat, request.model, with_thoughts=request.shows_thoughts)
        if request.stream:
            seconds = service.settings.heartbeat_seconds
            return event_stream(told, headers, seconds, None, ApiError.anthropic_document, {"type": "ping"})
        return JSONResponse(await unless_gone(connection, message(told)), headers=headers)

    @router.post("/count_tokens")
    async def count_tokens(request: CountRequest, connection: Request) -> Response:
        asked, missing = await asyncio.to_thread(_for_model, service, request)

        async def count() -> dict[str, Any]:
            chat = await service.chat(asked)
            async for _ in chat.events():
                pass
            return {"input_tokens": usage(chat.answers)["prompt_tokens"]}

        return JSONResponse(await unless_gone(connection, count()), headers=left_out(missing))

    return router


def _for_model(service: Service, request: CountRequest) -> tuple[ChatRequest, list[str]]:
    """The request as one for a chat, and what is left out of it.

    Anthropic's clients ask for thoughts by default: such a wish is left out for a model that knows none.
    """
    asked, missing = request.request(), request.left_out
    wishes = asked.enable_thinking or asked.reasoning_effort is not None
    if wishes and not knows_thinking(service.model(request.model).template, tools=bool(asked.tools)):
        asked = asked.model_copy(update={"enable_thinking": None, "reasoning_effort": None})
        missing.append("thinking")
    return asked, missing


async def message(told: AsyncIterator[dict[str, Any]]) -> dict[str, Any]:
    """The document of the answer whose events these are, once it has ended."""
    whole: dict[str, Any] = {}
    content: list[dict[str, Any]] = []
    async for event in told:
        match event["type"]:
            case "message_start":
                whole = event["message"]
            case "content_block_start":
                content.append(event["content_block"])
            case "content_block_delta":
                _extend(content[-1], event["delta"])
            case "message_delta":
                whole |= event["delta"]
                whole["usage"] |= event["usage"]
    return {**whole, "content": content}


def _extend(block: dict[str, Any], delta: dict[str, Any]) -> None:
    if delta["type"] == "input_json_delta":
        block["input"] = json.loads(delta["partial_json"])
    else:
        key = delta["type"].removesuffix("_delta")
        block[key] += delta[key]


async def events(chat: Chat, model: str, *, with_thoughts: bool = True) -> AsyncIterator[dict[str, Any]]:
    """The events of a stream: content comes in blocks, of which one is open at a time."""
    start: dict[str, Any] = {
        "id": f"msg_{uuid.uuid4().hex}",
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {"input_tokens": chat.answers.prompt_tokens, "output_tokens": 0},
    }
    yield {"type": "message_start", "message": start}
    blocks = _Blocks()
    async for event in chat.events():
        if isinstance(event, Delta):
            thought = event.thought if with_thoughts else ""
            for one in (*blocks.text("thinking", thought), *blocks.text("text", event.text)):
                yield one
            continue
        for one in blocks.calls(event):
            yield one
        stop = event.finished.stop_text or None
        reason = {"stop": "stop_sequence" if stop else "end_turn", "length": "max_tokens"}.get(event.reason, "tool_use")
        delta = {"stop_reason": reason, "stop_sequence": stop if reason == "stop_sequence" else None}
        yield {"type": "message_delta", "delta": delta, "usage": _usage(chat)}
    yield {"type": "message_stop"}


class _Blocks:
    """The blocks of an answer; begins one where the kind of content changes."""

    def __init__(self) -> None:
        self._count = 0
        self._open = ""

    def text(self, kind: str, text: str) -> list[dict[str, Any]]:
        """The events of further text or thoughts."""
        if not text:
            return []
        found = []
        if self._open != kind:
            found = [*self._close(), self._begin({"type": kind, kind: ""} | _MORE.get(kind, {}))]
            self._open = kind
        return [*found, self._delta({"type": f"{kind}_delta", kind: text})]

    def calls(self, end: End) -> list[dict[str, Any]]:
        """The events of the calls at an answer's end."""
        found = self._close()
        for call in end.calls:
            block = {"type": "tool_use", "id": f"toolu_{uuid.uuid4().hex[:24]}", "name": call.name, "input": {}}
            found.append(self._begin(block))
            found.append(self._delta({"type": "input_json_delta", "partial_json": call.arguments}))
            self._open = "tool_use"
            found += self._close()
        return found

    def _begin(self, block: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_start", "index": self._count, "content_block": block}

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": self._count, "delta": delta}

    def _close(self) -> list[dict[str, Any]]:
        if not self._open:
            return []
        self._open = ""
        self._count += 1
        return [{"type": "content_block_stop", "index": self._count - 1}]


_MORE = {"thinking": {"signature": ""}}
"""Fields of a block beside its text: clients expect a signature of thoughts."""


def _usage(chat: Chat) -> dict[str, Any]:
    """Anthropic's object, in which tokens from the cache are not among the input's."""
    tokens = usage(chat.answers)
    cached = tokens["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": tokens["prompt_tokens"] - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": tokens["completion_tokens"],
    }
