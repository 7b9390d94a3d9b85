# SPDX-License-Identifier: Apache-2.0
"""OpenAI's API: /v1/models, /v1/chat/completions and /v1/completions."""

import codecs
import time
import uuid
from collections import defaultdict
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from flownpu.generate.worker import Likelihood
from flownpu.serve.requests.openai import ChatRequest, CompletionRequest
from flownpu.serve.routes.json_route import JsonRoute
from flownpu.serve.service import Chat, Delta, End, Service, usage
from flownpu.serve.streams import event_stream, unless_gone


def openai_routes(service: Service) -> APIRouter:
    """The routes to a server's models."""
    router = APIRouter(route_class=JsonRoute, prefix="/v1")

    def model(name: str) -> dict[str, Any]:
        """A model for the clients of OpenAI, Anthropic and others, which name the context's length differently."""
        created = service.catalogue.created
        context = service.context_length(name)
        return {
            "id": name,
            "object": "model",
            "created": created,
            "owned_by": "flownpu",
            "type": "model",
            "display_name": name,
            "lifecycle": "active",
            "created_at": datetime.fromtimestamp(created, UTC).isoformat().replace("+00:00", "Z"),
            **(dict.fromkeys(("context_length", "max_model_len", "max_input_tokens"), context) if context else {}),
        }

    @router.get("/models")
    async def models() -> dict[str, Any]:
        ends = {"has_more": False, "first_id": service.names[0], "last_id": service.names[-1]} if service.names else {}
        return {"object": "list", "data": [model(name) for name in service.names], **ends}

    @router.get("/models/{name:path}")
    async def one_model(name: str) -> dict[str, Any]:
        return model(name)

    @router.post("/chat/completions")
    async def chat_completions(request: ChatRequest, connection: Request) -> Response:
        chat = await unless_gone(connection, service.chat(request))
        if request.stream:
            return event_stream(_chat_chunks(chat, request), chat.headers, service.settings.heartbeat_seconds)
        return JSONResponse(await unless_gone(connection, chat_completion(chat, request)), headers=chat.headers)

    @router.post("/completions")
    async def completions(request: CompletionRequest, connection: Request) -> Response:
        chat = await unless_gone(connection, service.complete(request))
        if request.stream:
            return event_stream(_completion_chunks(chat, request), chat.headers, service.settings.heartbeat_seconds)
        return JSONResponse(await unless_gone(connection, completion(chat, request)))

    return router


def _head(kind: str, model: str) -> dict[str, Any]:
    name = "chatcmpl" if kind.startswith("chat") else "cmpl"
    return {"id": f"{name}-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()), "model": model}


async def _whole(chat: Chat) -> list[tuple[str, str, list[tuple[Likelihood, ...]], End]]:
    """Each answer's text, thoughts, likelihoods and end, once all have ended."""
    texts: defaultdict[int, list[str]] = defaultdict(list)
    thoughts: defaultdict[int, list[str]] = defaultdict(list)
    likelihoods: defaultdict[int, list[tuple[Likelihood, ...]]] = defaultdict(list)
    ends: dict[int, End] = {}
    async for event in chat.events():
        if isinstance(event, End):
            ends[event.index] = event
        else:
            texts[event.index].append(event.text)
            thoughts[event.index].append(event.thought)
            likelihoods[event.index] += event.likelihoods
    return [
        ("".join(texts[index]), "".join(thoughts[index]), likelihoods[index], ends[index])
        for index in range(len(chat.answers.questions))
    ]


async def chat_completion(chat: Chat, request: ChatRequest) -> dict[str, Any]:
    """The document of a chat's answers, once all have ended."""
    answers = []
    for index, (text, thought, likelihoods, end) in enumerate(await _whole(chat)):
        calls = [call.document() for call in end.calls]
        message = {"role": "assistant", "content": text if text or not calls else None, "refusal": None}
        message |= {"reasoning_content": thought} if thought else {}
        logprobs = {"content": [*map(_chat_likelihood, likelihoods)], "refusal": None} if request.logprobs else None
        answers.append(
            {
                "index": index,
                "message": {**message, "tool_calls": calls} if calls else message,
                "logprobs": logprobs,
                "finish_reason": end.reason,
            }
        )
    return {**_head("chat.completion", request.model), "choices": answers, "usage": usage(chat.answers, len(answers))}


async def _chat_chunks(chat: Chat, request: ChatRequest) -> AsyncIterator[dict[str, Any]]:
    choices = len(chat.answers.questions)
    head = _head("chat.completion.chunk", request.model)
    with_usage = request.stream_options is not None and request.stream_options.include_usage
    if with_usage:
        head["usage"] = None

    def chunk(index: int, delta: dict[str, Any], reason: str | None = None, likelihoods: Any = ()) -> dict[str, Any]:
        logprobs = {"content": [_chat_likelihood(one) for one in likelihoods], "refusal": None} if likelihoods else None
        return {**head, "choices": [{"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}]}

    for index in range(choices):
        yield chunk(index, {"role": "assistant", "content": ""})
    async for event in chat.events():
        if isinstance(event, Delta):
            if event.thought:
                yield chunk(event.index, {"reasoning_content": event.thought})
            if event.text or not event.thought:
                yield chunk(event.index, {"content": event.text}, None, event.likelihoods)
            continue
        if event.calls:
            yield chunk(event.index, {"tool_calls": [call.document(place) for place, call in enumerate(event.calls)]})
        yield chunk(event.index, {}, event.reason)
    if with_usage:
        yield {**head, "choices": [], "usage": usage(chat.answers, choices)}


async def completion(chat: Chat, request: CompletionRequest) -> dict[str, Any]:
    """The document of a completion's answers, once all have ended."""
    choices = [
        _completion_choice(request, index, text, likelihoods, end.reason, _Offsets())
        for index, (text, _, likelihoods, end) in enumerate(await _whole(chat))
    ]
    return {
        **_head("text_completion", request.model),
        "choices": choices,
        "usage": usage(chat.answers, request.n or 1),
    }


async def _completion_chunks(chat: Chat, request: CompletionRequest) -> AsyncIterator[dict[str, Any]]:
    head = _head("text_completion", request.model)
    offsets: defaultdict[int, _Offsets] = defaultdict(_Offsets)
    async for event in chat.events():
        place = offsets[event.index]
        if isinstance(event, Delta):
            choice = _completion_choice(request, event.index, event.text, event.likelihoods, None, place)
        else:
            choice = _completion_choice(request, event.index, "", (), event.reason, place)
        yield {**head, "choices": [choice]}
    if request.stream_options is not None and request.stream_options.include_usage:
        yield {**head, "choices": [], "usage": usage(chat.answers, request.n or 1)}


class _Offsets:
    """The offsets of an answer's tokens in its text."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._length = 0

    def next(self, token: Likelihood) -> int:
        """The characters before the answer's next token; incomplete ones do not count."""
        offset = self._length
        self._length += len(self._decoder.decode(token.data))
        return offset


def _completion_choice(
    request: CompletionRequest, index: int, text: str, likelihoods: Any, reason: str | None, offsets: _Offsets
) -> dict[str, Any]:
    logprobs = None
    if request.logprobs is not None:
        logprobs = {
            "tokens": [_completion_token(one[0]) for one in likelihoods],
            "token_logprobs": [one[0].logarithm for one in likelihoods],
            "top_logprobs": [None if one[0].logarithm is None else _by_text(one[1:]) for one in likelihoods],
            "text_offset": [offsets.next(one[0]) for one in likelihoods],
        }
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}


def _completion_token(one: Likelihood) -> str:
    r"""A token's text, or for a part of a character its bytes, such as "bytes:\xe2\x82", as in OpenAI's API."""
    return f"bytes:{one.text}" if one.data and one.text.encode() != one.data else one.text


def _by_text(likelihoods: tuple[Likelihood, ...]) -> dict[str, float | None]:
    """Logarithms by token. Of several tokens with one text the less likely have their numbers behind it."""
    found: dict[str, float | None] = {}
    for one in likelihoods:
        text = _completion_token(one)
        found[text if text not in found else f"{text} (token {one.token})"] = one.logarithm
    return found


def _chat_likelihood(likelihoods: tuple[Likelihood, ...]) -> dict[str, Any]:
    def entry(one: Likelihood) -> dict[str, Any]:
        return {"token": one.text, "logprob": one.logarithm, "bytes": list(one.data)}

    return {**entry(likelihoods[0]), "top_logprobs": [entry(one) for one in likelihoods[1:]]}
