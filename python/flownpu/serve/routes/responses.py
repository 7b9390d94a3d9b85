# SPDX-License-Identifier: Apache-2.0
"""OpenAI's /v1/responses, without the features that need a server that keeps conversations."""

import itertools
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from flownpu.serve.errors import ApiError
from flownpu.serve.requests.responses import ResponsesRequest
from flownpu.serve.routes.json_route import JsonRoute
from flownpu.serve.service import Chat, Delta, Service, usage
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
        if request.stream:
            return event_stream(_events(chat, request), chat.headers, end=None)
        return JSONResponse(await unless_gone(connection, response(chat, request)), headers=chat.headers)

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
    message: dict[str, Any] = {"type": "message", "id": _name("msg"), "role": "assistant"}
    place = {"item_id": message["id"], "output_index": 0, "content_index": 0}
    text, output = "", []
    reason = "stop"
    calls: list[ToolCall] = []
    async for one in chat.events():
        if not isinstance(one, Delta):
            reason, calls = one.reason, one.calls
            continue
        if one.thought and not one.text:
            continue  # thoughts are no part of the output
        if not text:
            yield event("output_item.added", output_index=0, item={**message, "status": "in_progress", "content": []})
            yield event("content_part.added", **place, part=_part(""))
        text += one.text
        yield event("output_text.delta", **place, delta=one.text, logprobs=[])
    if text or not calls:
        done = {**message, "status": "completed", "content": [_part(text)]}
        if not text:
            yield event("output_item.added", output_index=0, item={**message, "status": "in_progress", "content": []})
            yield event("content_part.added", **place, part=_part(""))
        yield event("output_text.done", **place, text=text, logprobs=[])
        yield event("content_part.done", **place, part=_part(text))
        yield event("output_item.done", output_index=0, item=done)
        output.append(done)
    for call in calls:
        item = _call(call)
        place = {"item_id": item["id"], "output_index": len(output)}
        begun = {**item, "status": "in_progress", "arguments": ""}
        yield event("output_item.added", output_index=len(output), item=begun)
        yield event("function_call_arguments.delta", **place, delta=call.arguments)
        yield event("function_call_arguments.done", **place, arguments=call.arguments, name=call.name)
        yield event("output_item.done", output_index=len(output), item=item)
        output.append(item)
    complete = reason != "length"
    whole |= {"status": "completed" if complete else "incomplete", "output": output, "usage": _usage(chat)}
    if complete:
        whole["completed_at"] = int(time.time())
    else:
        whole["incomplete_details"] = {"reason": "max_output_tokens"}
    yield event("completed" if complete else "incomplete", response=whole)


def _name(kind: str) -> str:
    return f"{kind}_{uuid.uuid4().hex}"


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


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
        "input_tokens_details": tokens["prompt_tokens_details"],
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
        "tools": settings["tools"] or [],
        "tool_choice": settings["tool_choice"] or "auto",
        "text": settings["text"] or {"format": {"type": "text"}},
    }
