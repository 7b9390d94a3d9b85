# SPDX-License-Identifier: Apache-2.0
"""Runs the server: it listens, reports its address, and shuts down in an orderly way."""

import asyncio
import contextlib
import signal
import socket
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from flownpu.errors import FlowNPUError
from flownpu.serve.application import application
from flownpu.serve.errors import ApiError
from flownpu.serve.service import Service

if TYPE_CHECKING:
    from asyncio import Transport

    from flownpu.serve.settings import ServerSettings

BACKLOG = 2048
"""Connections that the operating system queues until the server accepts them."""
CONNECTIONS = 1000
"""Connections that may be open at the same time; uvicorn answers further ones with 503."""


def serve(settings: "ServerSettings", host: str, port: int, say: Callable[[str], None]) -> None:
    """Serves until SIGINT or SIGTERM. The first model is loaded before the server listens.

    Args:
        settings: models and limits.
        host: address to listen on.
        port: port to listen on; 0: any free one.
        say: writes a line about what happens.

    Raises:
        FlowNPUError: the first model cannot be loaded, or the server cannot listen on the address.
        KeyboardInterrupt: it was ended by Ctrl-C, after all requests had been answered or their time was over.
    """
    with _listen(host, port) as listening:
        service = Service(settings)
        config = uvicorn.Config(
            application(service),
            log_config=None,
            http=_protocol(settings.limits.body_seconds),
            ws="none",
            lifespan="off",
            limit_concurrency=CONNECTIONS,
            timeout_graceful_shutdown=round(settings.limits.stopping_seconds),
            server_header=False,
        )
        asyncio.run(_run(_Server(config, service, say), listening))


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except (OSError, TypeError) as error:  # TypeError: a name that cannot be looked up
        reason = error.strerror if isinstance(error, OSError) else error
        raise FlowNPUError(
            f"cannot listen on {host}, port {port}: {reason}. --host and --port choose another address"
        ) from error


async def _run(server: "_Server", listening: socket.socket) -> None:
    try:
        try:
            await server.service.load_first()
        except ApiError as error:
            raise FlowNPUError(error.message) from error
        # When the server is done, uvicorn raises the signal that ended it once more. With this handler the signal kills
        # nothing. Outside the main thread no handler can be set (ValueError).
        with contextlib.suppress(ValueError):
            signal.signal(signal.SIGTERM, lambda *_: None)
        await server.serve(sockets=[listening])
    finally:
        await server.service.close()


def _protocol(seconds: float) -> type[H11Protocol]:
    """A protocol of uvicorn with two limits on waiting that uvicorn lacks.

    They are on a connection's first headers, and on a client that reads nothing of an answer that fills all buffers: it
    would hold them, and its connection, for ever.
    """

    class Protocol(H11Protocol):
        _unread: asyncio.TimerHandle | None = None

        def pause_writing(self) -> None:
            super().pause_writing()
            self._unread = self.loop.call_later(seconds, self.transport.abort)

        def resume_writing(self) -> None:
            super().resume_writing()
            self._forget_unread()

        def connection_lost(self, exc: Exception | None) -> None:
            self._forget_unread()
            super().connection_lost(exc)

        def _forget_unread(self) -> None:
            if self._unread is not None:
                self._unread.cancel()

        def connection_made(self, transport: "Transport") -> None:  # type: ignore[override]
            super().connection_made(transport)
            self.loop.call_later(seconds, self._close_if_silent)

        def _close_if_silent(self) -> None:
            if getattr(self, "cycle", None) is None and not self.transport.is_closing():
                self.transport.close()

    return Protocol


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, service: Service, say: Callable[[str], None]) -> None:
        super().__init__(config)
        self.service = service
        self._say = say

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Reports the server's address when it listens."""
        await super().startup(sockets)
        if self.started and sockets:
            host, port = sockets[0].getsockname()[:2]
            host = f"[{host}]" if ":" in host else host
            self._say(f"Listening on http://{host}:{port} (a page to chat at /, OpenAI's API at /v1, Ollama's at /api)")

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Reports the server's end, and the number of requests that still run."""
        running = sum(process.requests for process in self.service.catalogue.loaded().values())
        if not self.should_exit:
            left = f"{running} requests have {self.config.timeout_graceful_shutdown} s to end; " if running else ""
            self._say(f"Ending on {signal.Signals(sig).name}: {left}Ctrl-C again ends at once")
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Says whether requests were cut short."""
        await super().shutdown(sockets)
        running = sum(process.requests for process in self.service.catalogue.loaded().values())
        self._say(f"Ended; {running} requests were cut short" if running else "Ended; every request was answered")
