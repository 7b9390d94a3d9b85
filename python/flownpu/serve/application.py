# SPDX-License-Identifier: Apache-2.0
"""The server as an ASGI application: routes, error handlers, and the guards before them."""

import logging
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.middleware.trustedhost import TrustedHostMiddleware

from flownpu import __version__
from flownpu.serve.errors import ApiError, mistake
from flownpu.serve.guards import BodyGuard, KeyGuard, error_response
from flownpu.serve.requests.validation import refusal
from flownpu.serve.routes.anthropic import anthropic_routes
from flownpu.serve.routes.embeddings import embeddings_routes
from flownpu.serve.routes.ollama import ollama_routes
from flownpu.serve.routes.openai import openai_routes
from flownpu.serve.routes.page import page_routes
from flownpu.serve.routes.pictures import pictures_routes
from flownpu.serve.routes.pulling import pulling_routes
from flownpu.serve.routes.responses import responses_routes
from flownpu.serve.service import LEFT_OUT, UNENFORCED, Service
from flownpu.serve.streams import ClientGoneError

log = logging.getLogger(__name__)

CLIENT_GONE = 499
"""The status that logs show for a request whose client has disconnected; nginx uses the same number."""


def application(service: Service) -> FastAPI:
    """The routes to a server's models, behind the guards that its settings ask for."""
    app = FastAPI(title="FlowNPU", version=__version__, docs_url=None, redoc_url=None, openapi_url=None)
    openais = (openai_routes, embeddings_routes, pictures_routes, responses_routes)
    routes = (*openais, anthropic_routes, ollama_routes, pulling_routes)
    for router in (*(make(service) for make in routes), page_routes()):
        app.include_router(router)
    _add_state(app, service)
    _add_error_handlers(app)
    settings = service.settings
    # The middleware that is added last gets a request first.
    app.add_middleware(BodyGuard, limits=settings.limits)
    if settings.api_key is not None:
        app.add_middleware(KeyGuard, key=settings.api_key)
    if settings.origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.origins,
            allow_methods=["DELETE", "GET", "HEAD", "POST"],
            allow_headers=["*"],
            expose_headers=[UNENFORCED, LEFT_OUT],
            # Browsers ask this before a page of the internet may reach a server on this machine or its network.
            allow_private_network=True,
        )
    if "*" not in settings.hosts:
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=list(settings.hosts), www_redirect=False)
    return app


def _add_state(app: FastAPI, service: Service) -> None:
    @app.get("/health")
    async def health() -> dict[str, Any]:
        loaded = {*service.catalogue.loaded(), *(name for name, one in service.in_process.items() if one.is_loaded)}
        return {
            "status": "ok",
            "version": __version__,
            "models": {name: name in loaded for name in service.models},
        }

    @app.get("/metrics")
    async def metrics() -> Response:
        text = service.metrics.page(service.catalogue.loaded())
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")


def _add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    async def api_error(request: Request, error: ApiError) -> JSONResponse:
        return error_response(request.url.path, error)

    @app.exception_handler(RequestValidationError)
    async def validation_error(request: Request, error: RequestValidationError) -> JSONResponse:
        return error_response(request.url.path, refusal(error.errors(), error.body))

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> JSONResponse:
        message = f"{request.method} {request.url.path}: {error.detail}"
        return error_response(request.url.path, ApiError(error.status_code, message))

    @app.exception_handler(ClientGoneError)
    async def gone(_request: Request, _error: ClientGoneError) -> Response:
        return Response(status_code=CLIENT_GONE)

    @app.exception_handler(Exception)
    async def failure(request: Request, error: Exception) -> JSONResponse:
        log.error("%s %s failed", request.method, request.url.path, exc_info=error)
        return error_response(request.url.path, mistake())
