# SPDX-License-Identifier: Apache-2.0
"""The reading of a request's body, for the routes of all APIs."""

import email.message
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.datastructures import Headers, MutableHeaders

from flownpu.errors import FlowNPUError
from flownpu.serve.errors import invalid
from flownpu.serve.requests.reading import read_document

KIND = "application/json"


class JsonRoute(APIRoute):
    """A route that reads a body as JSON with `read_document`, whatever type its client declares.

    By default curl declares a form, and some clients declare nothing. A web page must declare JSON: a browser sends a
    form to the server of any origin, but JSON only if that server allows the page's origin. Browsers name the origin in
    every POST.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The function that answers a request, see `APIRoute`."""
        answer = super().get_route_handler()

        async def read_and_answer(request: Request) -> Response:
            headers = MutableHeaders(scope=request.scope)
            if request.method in {"POST", "DELETE"} and not _says_json(headers):
                if "origin" in headers:
                    raise invalid(f"expected a JSON object as body, with the header Content-Type: {KIND}")
                headers["content-type"] = KIND
            request = _JsonRequest(request.scope, request.receive)
            if await request.body():
                await request.json()
            return await answer(request)

        return read_and_answer


class _JsonRequest(Request):
    async def json(self) -> Any:
        if not hasattr(self, "_json"):
            try:
                self._json = read_document(await self.body())
            except FlowNPUError as error:
                raise invalid(f"the body is {error}", code="invalid_json") from error
        return self._json


def _says_json(headers: Headers) -> bool:
    """Whether FastAPI takes a body with these headers as JSON."""
    message = email.message.Message()
    message["content-type"] = headers.get("content-type", "")
    kind = message.get_content_subtype()
    return message.get_content_maintype() == "application" and (kind == "json" or kind.endswith("+json"))
