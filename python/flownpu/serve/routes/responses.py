# SPDX-License-Identifier: Apache-2.0
"""OpenAI's /v1/responses, without the features that need a server that keeps conversations."""

import itertools
import time
import uuid
from collections.abc import AsyncIterator, Callable
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from flownpu.serve.errors import ApiError
from flownpu.serve.requests.responses import ResponsesRequest
from flownpu.serve.routes.json_route import JsonRoute
from flownpu.serve.service import Chat, Delta, Service, left_out, usage
from flownpu.serve.streams import event_stream, unless_gone
from flownpu.serve.tools import ToolCall

NAMES = {"messages": "input", "response_format": "text.format", "max_completion_tokens": "max_output_tokens"}
"""This API's names of a chat's fields."""


def responses_routes(service: Service) -> APIRouter:
    """The route /v1/responses of a server."""
    router = APIRouter(route_class=JsonRoute, prefix="/v1")

    @router.post("/responses")
    async def responses(request: ResponsesRequest, connection: Request) -> Response:
        chat = await unless_gone(connection, begun(service, request))
        headers = chat.headers | left_out(request.left_out)
        if request.stream:
            return event_stream(_events(chat, request), headers, service.settings.heartbeat_seconds, end=None)
        return JSONResponse(await unless_gone(connection, response(chat, request)), headers=headers)

    return router


async def begun(service: Service, request: ResponsesRequest) -> Chat:
    """Begins the answer.

    Raises:
        ApiError: see `Service.chat`; `parameter` is the field's name in this API.
    """
    try:
        return await service.chat(request.request())
    except ApiError as error:
        field = (error.parameter or "").partition(".")[0]
        error.parameter = NAMES.get(field, error.parameter)
        raise


async def response(chat: Chat, request: ResponsesRequest) -> dict[str, Any]:
    """The document of the answer, once it has ended."""
    last: dict[str, Any] = {}
    async for event in _events(chat, request):
        last = event
    whole: dict[str, Any] = last["response"]
    return whole


async def _events(chat: Chat, request: ResponsesRequest) -> AsyncIterator[dict[str, Any]]:
    """The events of a stream; the last one holds the whole response."""
    numbers = itertools.count()
    whole = _response(request)

    def event(kind: str, **fields: Any) -> dict[str, Any]:
        return {"type": f"response.{kind}", "sequence_number": next(numbers), **fields}

    yield event("created", response=dict(whole))
    yield event("in_progress", response=dict(whole))
    output = _Output(event)
    reason = "stop"
    async for one in chat.events():
        if isinstance(one, Delta):
            # A token without text, such as a part of a character, is an event, too, unless it is of thoughts.
            further = output.text("reasoning", one.thought) if one.thought else []
            further += output.text("message", one.text) if one.text or not one.thought else []
        else:
            reason = one.reason
            further = output.end(one.calls)
        for each in further:
            yield each
    complete = reason != "length"
    whole |= {"status": "completed" if complete else "incomplete", "output": output.items, "usage": _usage(chat)}
    if complete:
        whole["completed_at"] = int(time.time())
    else:
        whole["incomplete_details"] = {"reason": "max_output_tokens"}
    yield event("completed" if complete else "incomplete", response=whole)


class _Output:
    """The items of an answer and the events that tell of them; one item is open at a time.

    Args:
        event: writes an event.
    """

    def __init__(self, event: Callable[..., dict[str, Any]]) -> None:
        self._event = event
        self._text = ""
        self._open: dict[str, Any] | None = None
        self.items: list[dict[str, Any]] = []

    def text(self, kind: str, text: str) -> list[dict[str, Any]]:
        """The events of further text of a message, or of thoughts."""
        found = []
        if self._open is None or self._open["type"] != kind:
            found = [*self._close(), *self._begin(kind)]
        self._text += text
        return [*found, self._event(f"{_PARTS[kind]}.delta", **self._place(), delta=text, **_logprobs(kind))]

    def end(self, calls: list[ToolCall]) -> list[dict[str, Any]]:
        """The events of the answer's end: an answer without text and calls has an empty message."""
        found = self._close()
        if not self.items and not calls:
            found = [*self._begin("message"), *self._close()]
        for call in calls:
            item = _call(call)
            number = len(self.items)
            place = {"item_id": item["id"], "output_index": number}
            begun = {**item, "status": "in_progress", "arguments": ""}
            found += [
                self._event("output_item.added", output_index=number, item=begun),
                self._event("function_call_arguments.delta", **place, delta=call.arguments),
                self._event("function_call_arguments.done", **place, arguments=call.arguments, name=call.name),
                self._event("output_item.done", output_index=number, item=item),
            ]
            self.items.append(item)
        return found

    def _place(self) -> dict[str, Any]:
        assert self._open is not None
        return {"item_id": self._open["id"], "output_index": len(self.items), "content_index": 0}

    def _begin(self, kind: str) -> list[dict[str, Any]]:
        self._open, self._text = {"type": kind, "id": _name(_PREFIXES[kind]), **_FIELDS[kind]}, ""
        item = {**self._open, "status": "in_progress", "content": []}
        return [
            self._event("output_item.added", output_index=len(self.items), item=item),
            self._event("content_part.added", **self._place(), part=_part(kind, "")),
        ]

    def _close(self) -> list[dict[str, Any]]:
        if self._open is None:
            return []
        kind = self._open["type"]
        item = {**self._open, "status": "completed", "content": [_part(kind, self._text)]}
        found = [
            self._event(f"{_PARTS[kind]}.done", **self._place(), text=self._text, **_logprobs(kind)),
            self._event("content_part.done", **self._place(), part=_part(kind, self._text)),
            self._event("output_item.done", output_index=len(self.items), item=item),
        ]
        self.items.append(item)
        self._open = None
        return found


_PARTS = {"message": "output_text", "reasoning": "reasoning_text"}
_PREFIXES = {"message": "msg", "reasoning": "rs"}
_FIELDS: dict[str, dict[str, Any]] = {"message": {"role": "assistant"}, "reasoning": {"summary": []}}


def _logprobs(kind: str) -> dict[str, Any]:
    return {"logprobs": []} if kind == "message" else {}


def _name(kind: str) -> str:
    return f"{kind}_{uuid.uuid4().hex}"


def _part(kind: str, text: str) -> dict[str, Any]:
    more: dict[str, Any] = {"annotations": [], "logprobs": []} if kind == "message" else {}
    return {"type": _PARTS[kind], "text": text, **more}


def _call(call: ToolCall) -> dict[str, Any]:
    return {
        "type": "function_call",
        "id": _name("fc"),
        "call_id": _name("call"),
        "name": call.name,
        "arguments": call.arguments,
        "status": "completed",
    }


def _usage(chat: Chat) -> dict[str, Any]:
    tokens = usage(chat.answers)
    return {
        "input_tokens": tokens["prompt_tokens"],
        "input_tokens_details": {**tokens["prompt_tokens_details"], "cache_write_tokens": 0},
        "output_tokens": tokens["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": tokens["total_tokens"],
    }


def _response(request: ResponsesRequest) -> dict[str, Any]:
    """The response document when the answer begins: no output yet."""
    settings = request.model_dump(
        by_alias=True,
        include={
            "instructions",
            "max_output_tokens",
            "temperature",
            "top_p",
            "tools",
            "tool_choice",
            "metadata",
            "text",
        },
    )
    return {
        "id": _name("resp"),
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "model": request.model,
        "output": [],
        "previous_response_id": None,
        "store": False,
        "usage": None,
        **settings,
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "tools": [tool for tool in settings["tools"] or [] if tool["type"] == "function"],
        "tool_choice": settings["tool_choice"] or "auto",
        "text": settings["text"] or {"format": {"type": "text"}},
    }
