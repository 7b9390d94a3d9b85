# SPDX-License-Identifier: Apache-2.0
"""Ollama's /api/pull and /api/delete, where the server allows them; /api/create is refused."""

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from flownpu.errors import FlowNPUError, require
from flownpu.serve.errors import ApiError, invalid, unknown_model
from flownpu.serve.processes.protocol import ModelSettings
from flownpu.serve.requests.pulling import NamedModel, OllamaCreate, OllamaPull
from flownpu.serve.routes.json_route import JsonRoute
from flownpu.serve.service import Service
from flownpu.serve.streams import line_stream, unless_gone

if TYPE_CHECKING:
    from flownpu.convert.progress import Progress

SECONDS = 0.2
"""Between two lines about a stage of a pull."""


def pulling_routes(service: Service) -> APIRouter:
    """The routes that change which models a server has."""
    router = APIRouter(route_class=JsonRoute)

    @router.post("/api/pull")
    async def pull(request: OllamaPull, connection: Request) -> Response:
        documents = _pulled(service, request.plain, _allowed(service))
        if request.stream is not False:
            return line_stream(documents, {}, lambda: {"status": f"pulling {request.plain}"})
        return JSONResponse(await unless_gone(connection, _last(documents)))

    @router.delete("/api/delete")
    async def delete(request: NamedModel) -> Response:
        _allowed(service)
        name, store = request.plain, _store()
        if name not in service.models:
            raise unknown_model(name, service.names)
        reference = store.parse(name)
        if reference is None or store.folder_of(reference) != service.models[name].folder:
            raise ApiError(403, f"the model {name} was not pulled: its folder was given when the server started")
        await service.remove(name)
        await asyncio.to_thread(store.remove, reference)
        return Response()

    @router.post("/api/create")
    async def create(request: OllamaCreate) -> Response:
        raise invalid(
            f"this server makes no model {request.plain!r} of a Modelfile: `flownpu serve --alias NAME=MODEL` gives a "
            "model another name, `flownpu convert` takes checkpoints and GGUF files, and each request may have its own "
            "system turn and options"
        )

    return router


def _allowed(service: Service) -> ModelSettings:
    settings = service.settings.pulled
    if settings is None:
        raise ApiError(
            403,
            "clients may not pull or delete models here: start `flownpu serve` with --allow-pull, or use `flownpu "
            "pull` and `flownpu remove`",
        )
    return settings


def _store() -> Any:
    try:
        return require("flownpu.hub.store", extra="convert", purpose="A model by its name")
    except FlowNPUError as error:
        raise ApiError(503, str(error)) from error


async def _pulled(service: Service, name: str, settings: ModelSettings) -> AsyncIterator[dict[str, Any]]:
    """Pulls a model, and adds it to the server's; the documents say how far it is.

    A client that leaves ends only the documents: the pull goes on, and another request waits for it.
    """
    store, loop = _store(), asyncio.get_running_loop()
    reference = store.parse(name)
    if reference is None:
        raise invalid(f"expected a short name, or a repository as in ORGANISATION/MODEL:GGUF, got {name!r}", "model")
    told: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()

    def tell(document: dict[str, Any] | None) -> None:
        loop.call_soon_threadsafe(told.put_nowait, document)

    def work() -> Any:
        try:
            return store.pull(reference, _Report(tell), lambda line: tell({"status": line}))
        finally:
            tell(None)

    yield {"status": f"pulling {name}"}
    pulling = asyncio.create_task(asyncio.to_thread(work))
    while (document := await told.get()) is not None:
        yield document
    try:
        folder = await pulling
    except FlowNPUError as error:
        raise invalid(str(error), "model") from error
    if name in service.models:
        await service.drop(name)
    else:
        service.add(name, replace(settings, folder=folder))
    yield {"status": "success"}


class _Report:
    """Turns a conversion's progress into Ollama's lines, a few a second."""

    def __init__(self, tell: Any) -> None:
        self._tell = tell
        self._next = 0.0

    def __call__(self, progress: "Progress") -> None:
        now = time.monotonic()
        if now < self._next and progress.done < progress.total:
            return
        self._next = now + SECONDS
        # Ollama's client shows a bar for each digest.
        place = {"digest": progress.stage, "total": progress.total, "completed": progress.done}
        self._tell({"status": progress.stage, **place})


async def _last(documents: AsyncIterator[dict[str, Any]]) -> dict[str, Any]:
    last: dict[str, Any] = {}
    async for document in documents:
        last = document
    return last
