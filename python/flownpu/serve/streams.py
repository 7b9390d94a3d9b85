# SPDX-License-Identifier: Apache-2.0
"""Streamed and whole responses; a client that disconnects ends its computation."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

from fastapi import Request
from fastapi.responses import StreamingResponse
from sse_starlette import EventSourceResponse, ServerSentEvent
from sse_starlette.sse import AppStatus

from flownpu.serve.errors import ApiError, mistake

log = logging.getLogger(__name__)

# When the server receives the signal to end, streams continue to their end; uvicorn limits the time that this may take.
AppStatus.enable_automatic_graceful_drain = False


class ClientGoneError(Exception):
    """The client has disconnected, so no answer is needed."""


def event_stream(
    documents: AsyncIterator[dict[str, Any]],
    headers: dict[str, str],
    seconds: float,
    end: str | None = "[DONE]",
    error_document: Callable[[ApiError], dict[str, Any]] = ApiError.document,
    beat: dict[str, Any] | None = None,
) -> EventSourceResponse:
    """Server-sent events: one for each document, then `end`. An error on the way is sent as `error_document` writes it.

    The value of a document's key "type", if it has one, is the event's name, as in /v1/responses. A client hears all
    `seconds` that the server is alive: by the document `beat`, or by a comment, which clients skip.
    """

    def event(document: dict[str, Any]) -> ServerSentEvent:
        return ServerSentEvent(_json(document), event=document.get("type"), sep="\n")

    def alive() -> ServerSentEvent:
        return ServerSentEvent(comment="alive", sep="\n") if beat is None else event(beat)

    async def events() -> AsyncIterator[ServerSentEvent | dict[str, str]]:
        async for item in _until_error(documents):
            yield event(error_document(item) if isinstance(item, ApiError) else item)
            if isinstance(item, ApiError):
                return
        if end is not None:
            yield {"data": end}

    return EventSourceResponse(events(), headers=headers, sep="\n", ping=seconds, ping_message_factory=alive)


def line_stream(
    documents: AsyncIterator[dict[str, Any]],
    headers: dict[str, str],
    seconds: float,
    beat: Callable[[], dict[str, Any]],
) -> StreamingResponse:
    """One JSON document per line, as Ollama's clients read them.

    Args:
        documents: the lines.
        headers: further headers of the response.
        seconds: how long there may be no line.
        beat: writes a line for whenever they have passed.
    """

    async def lines() -> AsyncIterator[str]:
        async for item in _with_beats(_until_error(documents), beat, seconds):
            yield f"{_json({'error': item.message} if isinstance(item, ApiError) else item)}\n"

    return StreamingResponse(lines(), headers=headers, media_type="application/x-ndjson")


async def _with_beats(items: AsyncIterator[Any], beat: Callable[[], Any], seconds: float) -> AsyncIterator[Any]:
    """The items, and a beat for whenever `seconds` have passed without one."""
    while True:
        coming: asyncio.Future[Any] = asyncio.ensure_future(anext(items, None))
        try:
            while not (await asyncio.wait({coming}, timeout=seconds))[0]:
                yield beat()
        finally:
            if not coming.done():
                coming.cancel()
                await asyncio.gather(coming, return_exceptions=True)
        if (item := coming.result()) is None:
            return
        yield item


async def _until_error(documents: AsyncIterator[dict[str, Any]]) -> AsyncIterator[dict[str, Any] | ApiError]:
    """The documents; an error on the way ends them, and is the last item."""
    try:
        async for document in documents:
            yield document
    except ApiError as error:
        yield error
    except Exception:
        log.exception("a stream broke off")
        yield mistake()


async def unless_gone(request: Request, work: Coroutine[Any, Any, Any]) -> Any:
    """Does the work, and returns its result; the work is cancelled when the client disconnects.

    Raises:
        ClientGoneError: the client disconnected.
    """
    task = asyncio.create_task(work)
    watch = asyncio.create_task(_gone(request))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError
        return task.result()
    finally:
        for one in (task, watch):
            one.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _json(document: dict[str, Any]) -> str:
    return json.dumps(document, ensure_ascii=False, separators=(",", ":"))
