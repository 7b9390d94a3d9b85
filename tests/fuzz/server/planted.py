# SPDX-License-Identifier: Apache-2.0
"""`flownpu serve` with a fault that is planted while it runs: what a campaign must find.

    python -m tests.fuzz.server.planted MODEL...

A GET of /planted/NAME plants one of FAULTS in all further requests; /planted/none removes it.
"""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING, Any

from flownpu.cli import main
from flownpu.serve import server
from flownpu.serve.application import application

if TYPE_CHECKING:
    from collections.abc import MutableMapping

    Message = MutableMapping[str, Any]

OPEN = {"/health", "/metrics", "/v1/models"}  # what the campaign itself asks
# Statuses and bodies of answers that replace the server's own.
ANSWERS = {
    "mistake": (500, b'{"error": {"message": "a mistake"}}'),
    "refusal": (400, b'{"error": {"message": "not today"}}'),
    "no words": (400, b'{"error": {"message": ""}}'),
    "internals": (400, b'{"error": {"message": "Traceback (most recent call last)"}}'),
    "never again": (429, b'{"error": {"message": "later"}}'),
    "no JSON": (200, b'{"choices": [NaN]}'),
}
FAULTS = (*ANSWERS, "silence", "cut", "other text", "no end", "leak", "log", "files")
SILENCE = 6.0  # seconds: longer than a test waits
LEAK = 16 << 20  # bytes that each request leaves


class Planted:
    """ASGI middleware around the server's application."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._fault = "none"
        self._kept: list[Any] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Handles one request, as ASGI specifies."""
        path = scope["path"]
        if path.startswith("/planted/"):
            self._fault, self._kept = path.rpartition("/")[2], []
            await _answer(send, 200, b"{}")
        elif path in OPEN or self._fault == "none":
            await self._app(scope, receive, send)
        elif self._fault in ANSWERS:
            await _answer(send, *ANSWERS[self._fault])
        elif self._fault == "silence":
            await asyncio.sleep(SILENCE)
        elif self._fault in {"cut", "other text", "no end"}:
            await self._app(scope, receive, self._changing(send))
        else:
            self._keep()
            await self._app(scope, receive, send)

    def _keep(self) -> None:
        if self._fault == "leak":
            self._kept.append(b"x" * LEAK)
        elif self._fault == "log":
            print("x" * 100_000, file=sys.stderr)
        else:
            self._kept.append(open(sys.executable, "rb"))  # noqa: SIM115, PTH123 it is left open, that is the fault

    def _changing(self, send: Any) -> Any:
        async def changed(message: Message) -> None:
            if message["type"] == "http.response.body":
                body = message.get("body", b"")
                if self._fault == "cut":
                    raise RuntimeError("planted: the answer is cut")
                if self._fault == "no end":
                    body = body.replace(b"[DONE]", b"{}").replace(b'"done":true', b'"done":null')
                else:
                    body = body.replace(b"The", b"Teh")
                message = {**message, "body": body}
            await send(message)

        return changed


async def _answer(send: Any, status: int, body: bytes) -> None:
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


if __name__ == "__main__":
    server.application = lambda service: Planted(application(service))  # type: ignore[assignment, attr-defined, return-value]
    sys.exit(main(["serve", *sys.argv[1:]]))
