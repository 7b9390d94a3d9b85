# SPDX-License-Identifier: Apache-2.0
"""Ollama's API: /api/chat, /api/generate, /api/tags, /api/show, /api/ps, /api/version, and that the server is there."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from flownpu import __version__
from flownpu.model.folder import PIPELINE, read_genai_config, read_json
from flownpu.serve.embeddings import Embedder, Ranker
from flownpu.serve.pictures import Painter
from flownpu.serve.requests.ollama import OllamaChat, OllamaGenerate, OllamaShow
from flownpu.serve.requests.openai import ChatRequest
from flownpu.serve.routes.json_route import JsonRoute
from flownpu.serve.service import Chat, Delta, End, Service
from flownpu.serve.streams import line_stream, unless_gone
from flownpu.serve.template_variables import has_switch

NANOSECONDS = 1e9
_ABILITIES = {Embedder: "embedding", Painter: "image", Ranker: "rerank"}


def ollama_routes(service: Service) -> APIRouter:
    """The routes to a server's models."""
    router = APIRouter(route_class=JsonRoute)

    @router.head("/")
    async def there() -> Response:
        return Response()

    @router.get("/api/version")
    async def version() -> dict[str, str]:
        return {"version": __version__}

    @router.get("/api/tags")
    async def tags() -> dict[str, Any]:
        return {"models": [_description(service, name) for name in service.names]}

    @router.get("/api/ps")
    async def running() -> dict[str, Any]:
        loaded = service.catalogue.loaded()
        names = [name for name in service.names if name in loaded]
        return {"models": [{**_description(service, name), "size": loaded[name].memory()} for name in names]}

    @router.post("/api/show")
    async def show(request: OllamaShow) -> dict[str, Any]:
        name = request.model.removesuffix(":latest")
        own = service.resolve(name)
        if (other := service.in_process.get(own)) is not None and own in service.names:
            described = _description(service, name)
            ability = next(text for kind, text in _ABILITIES.items() if isinstance(other, kind))
            return {"details": described["details"], "modified_at": described["modified_at"], "template": ""} | {
                "capabilities": [ability],
                "model_info": {"general.architecture": described["details"]["family"]},
            }
        model = service.model(name)
        settings = read_genai_config(model.folder)["model"]
        thinks = await asyncio.to_thread(has_switch, model.template)
        abilities = {"vision": model.takes_images, "tools": model.template, "thinking": thinks}
        return {
            **{key: value for key, value in _description(service, name).items() if key in {"details", "modified_at"}},
            "template": model.template.texts.get("default", ""),
            "capabilities": ["completion", *(name for name, has in abilities.items() if has)],
            "model_info": {
                "general.architecture": settings.get("type", ""),
                f"{settings.get('type', '')}.context_length": settings["context_length"],
            },
        }

    @router.post("/api/chat")
    async def chat(request: OllamaChat, connection: Request) -> Response:
        if not request.messages:
            return await load(request, _message("", None))
        return await answer(request, connection, _message)

    @router.post("/api/generate")
    async def generate(request: OllamaGenerate, connection: Request) -> Response:
        if not request.prompt:
            return await load(request, _response("", None))
        return await answer(request, connection, _response)

    async def load(request: OllamaChat | OllamaGenerate, empty: dict[str, Any]) -> Response:
        """Loads a model before it is needed, or unloads it, as Ollama does for a request without a prompt."""
        name, done = request.model.removesuffix(":latest"), "unload" if request.unloads else "load"
        service.model(name)
        await (service.drop(name) if request.unloads else service.load(name))
        return JSONResponse({"model": request.model, "created_at": _now(), **empty, "done": True, "done_reason": done})

    async def answer(request: OllamaChat | OllamaGenerate, connection: Request, part: Any) -> Response:
        asked = request.request()
        begin = service.chat(asked) if isinstance(asked, ChatRequest) else service.complete(asked)
        chat = await unless_gone(connection, begin)
        documents = _documents(chat, request.model, part)
        if request.unloads:
            documents = _then(documents, lambda: service.drop(asked.model))
        if request.stream is not False:

            def beat() -> dict[str, Any]:
                return {"model": request.model, "created_at": _now(), **part("", None), "done": False}

            return line_stream(documents, chat.headers, service.settings.heartbeat_seconds, beat)
        return JSONResponse(await unless_gone(connection, _whole(documents)), headers=chat.headers)

    return router


async def _then(documents: AsyncIterator[dict[str, Any]], last: Callable[[], Awaitable[Any]]) -> AsyncIterator[Any]:
    """The documents; then what comes last is done, before the stream ends."""
    try:
        async for document in documents:
            yield document
    finally:
        await last()


def _now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def _description(service: Service, name: str) -> dict[str, Any]:
    name, asked = service.resolve(name), name
    folder = service.models[name].folder
    is_pipeline = isinstance(service.in_process.get(name), Painter)  # whose files are in folders
    files = [file.stat() for file in folder.glob("**/*" if is_pipeline else "*") if file.is_file()]
    changed = datetime.fromtimestamp(max(file.st_mtime for file in files), UTC).isoformat()
    match service.in_process.get(name):
        case Embedder() | Ranker():
            kind = str(read_json(folder / "config.json").get("model_type", ""))
        case Painter():
            kind = str(read_json(folder / PIPELINE).get("_class_name", ""))
        case _:
            kind = str(read_genai_config(folder)["model"].get("type", ""))
    return {
        "name": asked,
        "model": asked,
        "modified_at": changed.replace("+00:00", "Z"),
        "size": sum(file.st_size for file in files),
        "digest": "",
        "details": {
            "format": "onnx",
            "family": kind,
            "families": [kind],
            "parameter_size": "",
            "quantization_level": "",
        },
    }


def _message(text: str, end: End | None, thought: str = "") -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": text}
    message |= {"thinking": thought} if thought else {}
    if end is not None and end.calls:
        calls = [{"name": call.name, "arguments": json.loads(call.arguments)} for call in end.calls]
        message["tool_calls"] = [{"function": call} for call in calls]
    return {"message": message}


def _response(text: str, _end: End | None, thought: str = "") -> dict[str, Any]:
    return {"response": text, **({"thinking": thought} if thought else {})}


async def _documents(chat: Chat, model: str, part: Any) -> AsyncIterator[dict[str, Any]]:
    async for event in chat.events():
        head = {"model": model, "created_at": _now()}
        if isinstance(event, Delta):
            yield {**head, **part(event.text, None, event.thought), "done": False}
            continue
        times = chat.answers.times[event.index]
        yield {
            **head,
            **part("", event),
            "done": True,
            "done_reason": "length" if event.reason == "length" else "stop",
            "total_duration": round(NANOSECONDS * (times.last - times.asked)),
            "load_duration": round(NANOSECONDS * (times.started - times.asked)),
            "prompt_eval_count": event.finished.prompt_tokens,
            "prompt_eval_duration": round(NANOSECONDS * (times.first - times.started)),
            "eval_count": event.finished.new_tokens,
            "eval_duration": round(NANOSECONDS * (times.last - times.first)),
        }


async def _whole(documents: AsyncIterator[dict[str, Any]]) -> dict[str, Any]:
    """A stream's documents joined into one: the last document, with the text of all."""
    texts: list[str] = []
    thoughts: list[str] = []
    last: dict[str, Any] = {}
    async for document in documents:
        last = document
        said = document if "response" in document else document["message"]
        texts.append(said["response" if "response" in said else "content"])
        thoughts.append(said.get("thinking", ""))
    thinking = {"thinking": "".join(thoughts)} if any(thoughts) else {}
    if "response" in last:
        return {**last, "response": "".join(texts), **thinking}
    return {**last, "message": {**last["message"], "content": "".join(texts), **thinking}}
