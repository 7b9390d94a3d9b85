# SPDX-License-Identifier: Apache-2.0
"""Middleware before the routes: the key that clients must show, and the size and time of a request's body."""

import asyncio
import contextlib
import hmac
from typing import TYPE_CHECKING, Any

from starlette.datastructures import Headers
from starlette.responses import JSONResponse

from flownpu.serve.errors import ApiError, busy

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from flownpu.serve.settings import Limits

OPEN_PATHS = ("/health", "/", "/page/")
"""Paths that need no key: whether the server is alive, and the chat page, which asks its user for the key."""


TOGETHER = 8
"""How many bodies of the largest size the server holds at the same time: some 256 MiB, or thousands of usual ones."""
LINGERING_SECONDS = 5.0
"""How long the rest of a refused body is read and dropped: a connection closed with data unread is reset, and a client
that still sends then loses the answer that says why (RFC 9112, section 9.6). Ample for 100 MB on a local network."""


def error_response(path: str, error: ApiError) -> JSONResponse:
    """An error in the form of the API that a path belongs to."""
    if path.startswith("/api/"):
        document: dict[str, Any] = {"error": error.message}
    else:
        document = error.anthropic_document() if path.startswith("/v1/messages") else error.document()
    return JSONResponse(document, error.status, error.headers)


class KeyGuard:
    """Middleware that refuses requests without the key with 401.

    Args:
        app: the application that gets the other requests.
        key: what requests must have in the header `Authorization: Bearer KEY`, or as Anthropic's clients send it, in
            `X-Api-Key: KEY`.
    """

    def __init__(self, app: "ASGIApp", key: str) -> None:
        self._app = app
        self._key = key.encode()

    async def __call__(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        """Handles one request, as ASGI specifies."""
        if scope["type"] == "http" and not self._may(scope):
            error = ApiError(
                401,
                "expected the server's key as `Authorization: Bearer KEY`",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
            await error_response(scope["path"], error)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _may(self, scope: "Scope") -> bool:
        path = scope["path"]
        if path in OPEN_PATHS or path.startswith("/page/") or scope["method"] == "OPTIONS":
            return True
        headers = Headers(scope=scope)
        kind, _, key = headers.get("authorization", "").partition(" ")
        given = key if kind.lower() == "bearer" else headers.get("x-api-key", "")
        # compare_digest's time does not depend on the number of right characters.
        return hmac.compare_digest(given.strip().encode(), self._key)


class BodyGuard:
    """Middleware that reads a request's whole body before the application sees the request.

    A body that is too large is refused with 413, one that arrives too slowly with 408, and one that finds no room
    beside those of other requests with 429.

    Args:
        app: the application that gets the request and its body.
        limits: the bounds on the body's size and time.
    """

    def __init__(self, app: "ASGIApp", limits: "Limits") -> None:
        self._app = app
        self._limits = limits
        self._held = 0
        """Bytes of the bodies of all requests that are read or answered."""

    async def __call__(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        """Handles one request, as ASGI specifies."""
        if scope["type"] != "http" or scope["method"] not in {"POST", "PUT", "PATCH", "DELETE"}:
            await self._app(scope, receive, send)
            return
        parts: list[bytes] = []
        refused = None
        try:
            if await self._read(parts, scope, receive):
                await self._answer(b"".join(parts), scope, receive, send)
        except ApiError as error:
            refused = error
        finally:
            self._held -= sum(map(len, parts))
            parts.clear()
        if refused is not None:
            await self._refuse(refused, scope, receive, send)

    async def _answer(self, body: bytes, scope: "Scope", receive: "Receive", send: "Send") -> None:
        first = True

        async def again() -> "Message":
            nonlocal first
            if first:
                first = False
                return {"type": "http.request", "body": body, "more_body": False}
            return await receive()

        await self._app(scope, again, send)

    async def _refuse(self, error: ApiError, scope: "Scope", receive: "Receive", send: "Send") -> None:
        """Answers at once, but completes the answer, which closes the connection, only after reading the body."""

        async def hold_open(message: "Message") -> None:
            await send({**message, "more_body": True} if message["type"] == "http.response.body" else message)

        await error_response(scope["path"], error)(scope, receive, hold_open)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LINGERING_SECONDS):
                while (await receive()).get("more_body", False):
                    pass
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _read(self, parts: list[bytes], scope: "Scope", receive: "Receive") -> bool:
        """Adds the body's parts to a list; false if the client has disconnected."""
        limit, seconds = self._limits.body_bytes, self._limits.body_seconds
        closing = {"Connection": "close"}
        large = ApiError(
            413, f"the body is larger than {limit} bytes, which this server takes", code="too_large", headers=closing
        )
        declared = Headers(scope=scope).get("content-length", "")
        if declared.isdecimal() and int(declared) > limit:
            raise large
        size = 0
        try:
            async with asyncio.timeout(seconds):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return False
                    part = message.get("body", b"")
                    size += len(part)
                    if size > limit:
                        raise large
                    if self._held + len(part) > TOGETHER * limit:
                        raise busy("the bodies of all requests together are too large: try again later", 10)
                    parts.append(part)
                    self._held += len(part)
                    if not message.get("more_body", False):
                        return True
        except TimeoutError:
            raise ApiError(
                408, f"the body did not arrive within {seconds:.0f} s", code="too_slow", headers=closing
            ) from None
