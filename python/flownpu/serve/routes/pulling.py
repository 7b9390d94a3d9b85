# SPDX-License-Identifier: Apache-2.0
"""Ollama's /api/pull and /api/delete, where the server allows them; /api/create is refused."""

import asyncio
import contextlib
import logging
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from flownpu.errors import FlowNPUError, require
from flownpu.serve.errors import ApiError, busy, invalid, unknown_model
from flownpu.serve.processes.protocol import ModelSettings
from flownpu.serve.requests.pulling import NamedModel, OllamaCreate, OllamaPull
from flownpu.serve.routes.json_route import JsonRoute
from flownpu.serve.service import Service
from flownpu.serve.streams import line_stream, unless_gone

if TYPE_CHECKING:
    from flownpu.convert.progress import Progress

log = logging.getLogger(__name__)

SECONDS = 0.2
"""Between two looks at how far a pull is."""
MOST = 4
"""Pulls at the same time: a download may fill the line, a conversion all cores."""


def pulling_routes(service: Service) -> APIRouter:
    """The routes that change which models a server has."""
    router = APIRouter(route_class=JsonRoute)
    pulls = _Pulls(service)

    @router.post("/api/pull")
    async def pull(request: OllamaPull, connection: Request) -> Response:
        documents = _told(request.plain, pulls.begin(request.plain, _allowed(service)))
        if request.stream is not False:
            seconds = service.settings.heartbeat_seconds
            return line_stream(documents, {}, seconds, lambda: {"status": f"pulling {request.plain}"})
        return JSONResponse(await unless_gone(connection, _last(documents)))

    @router.delete("/api/delete")
    async def delete(request: NamedModel) -> Response:
        _allowed(service)
        name, store = request.plain, _store()
        if name not in service.models:
            raise unknown_model(name, service.names)
        reference, folder = store.parse(name), service.models[name].folder
        if reference is None or store.folder_of(reference) != folder:
            raise ApiError(403, f"the model {name} was not pulled: its folder was given when the server started")
        if pulls.has(reference):
            raise invalid(f"the model {name} is being pulled: delete it afterwards", "model")
        # A model has several names if it was pulled by several.
        for other in [other for other, settings in service.models.items() if settings.folder == folder]:
            await service.remove(other)
        try:
            await asyncio.to_thread(store.remove, reference)
        except FlowNPUError as error:
            raise invalid(str(error), "model") from error
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


@dataclass
class _Pull:
    """A pull that goes on, whether or not a client waits for it."""

    stages: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Ollama's newest line about each stage; another thread adds to it."""
    done: "asyncio.Task[None] | None" = None


class _Pulls:
    """The pulls that go on: one of each model.

    Each has a thread of its own, since it lasts as long as the hub likes, and the event loop lends only few threads, on
    which all other requests depend. The server's end does not wait: an interrupted pull leaves nothing half there.
    """

    def __init__(self, service: Service) -> None:
        self._service = service
        self._going: dict[Any, _Pull] = {}

    def has(self, reference: Any) -> bool:
        """Whether a model is being pulled."""
        return reference in self._going

    def begin(self, name: str, settings: ModelSettings) -> _Pull:
        """The pull of a model; it begins unless it goes on.

        Raises:
            ApiError: it is no name of a model, or too many models are being pulled.
        """
        store = _store()
        reference = store.parse(name)
        if reference is None:
            raise invalid(
                f"expected a short name, or a repository as in ORGANISATION/MODEL:GGUF, got {name!r}", "model"
            )
        if (pull := self._going.get(reference)) is not None:
            return pull
        if len(self._going) >= MOST:
            raise busy(f"{MOST} models are being pulled: try again later", 10)
        pull = self._going[reference] = _Pull()

        def report(progress: "Progress") -> None:
            # Ollama's client shows a bar for each digest.
            place = {"digest": progress.stage, "total": progress.total, "completed": progress.done}
            pull.stages[progress.stage] = {"status": progress.stage, **place}

        def work() -> Any:
            return store.pull(reference, report, lambda line: pull.stages.update({line: {"status": line}}))

        async def run() -> None:
            try:
                folder = await _in_thread(work)
            finally:
                del self._going[reference]
            if name in self._service.models:
                await self._service.drop(name)
            else:
                self._service.add(name, replace(settings, folder=folder))

        pull.done = asyncio.create_task(run())
        pull.done.add_done_callback(partial(_log, name))
        return pull


def _log(name: str, done: "asyncio.Task[None]") -> None:
    if not done.cancelled():
        error = done.exception()
        log.info("%s: %s", ascii(name)[1:-1], "pulled" if error is None else f"cannot be pulled: {error}")


async def _in_thread(work: Callable[[], Any]) -> Any:
    """Does the work in a new thread, which does not keep the process from ending."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Any] = loop.create_future()

    def tell(setting: Callable[[Any], None], value: Any) -> None:
        if not done.done():
            setting(value)

    def run() -> None:
        try:
            told = (done.set_result, work())
        except Exception as error:  # noqa: BLE001 it is raised where the result is awaited
            told = (done.set_exception, error)
        with contextlib.suppress(RuntimeError):  # the server has ended
            loop.call_soon_threadsafe(tell, *told)

    threading.Thread(target=run, daemon=True).start()
    return await done


async def _told(name: str, pull: _Pull) -> AsyncIterator[dict[str, Any]]:
    """Ollama's lines about a pull, until it ends. A client that leaves ends only these."""
    assert pull.done is not None
    yield {"status": f"pulling {name}"}
    told: dict[str, dict[str, Any]] = {}
    while True:
        ended = (await asyncio.wait({pull.done}, timeout=SECONDS))[0]
        for stage, document in list(pull.stages.items()):
            if told.get(stage) != document:
                told[stage] = document
                yield document
        if ended:
            break
    try:
        pull.done.result()
    except FlowNPUError as error:
        raise invalid(str(error), "model") from error
    yield {"status": "success"}


async def _last(documents: AsyncIterator[dict[str, Any]]) -> dict[str, Any]:
    last: dict[str, Any] = {}
    async for document in documents:
        last = document
    return last
