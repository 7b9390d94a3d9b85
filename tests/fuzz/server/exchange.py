# SPDX-License-Identifier: Apache-2.0
"""One request to an HTTP server, byte by byte, and the reply: bodies may be cut, slow or longer than they say."""

import asyncio
import base64
import contextlib
import http.client
import io
import time
from dataclasses import asdict, dataclass
from typing import Any, Literal

Manner = Literal["whole", "slow", "cut", "leave"]
PIECES = 4  # of a slow body


@dataclass(frozen=True)
class Request:
    """A request, byte by byte, and the manner of its sending.

    Attributes:
        kind: name of the kind of requests that it belongs to.
        method: HTTP's method.
        path: the request's target.
        headers: names and values, in this order; Host and Connection are added where they are missing.
        body: what follows the headers.
        manner: whole; slow: in pieces, with a pause after each; cut: the client leaves after `bytes_` of the body;
            leave: it leaves after `bytes_` of the answer.
        bytes_: see `manner`.
        pause: seconds between the pieces of a slow body.
        declared: the header Content-Length; None: the body's length; -1: none, and the body is sent in chunks.
        succeeds: whether anything but an answer (or a full queue, or no time) is a fault.
        schema: the JSON Schema that the answer's text must satisfy.
    """

    kind: str
    method: str
    path: str
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes = b""
    manner: Manner = "whole"
    bytes_: int = 0
    pause: float = 0.0
    declared: int | None = None
    succeeds: bool = False
    schema: Any = None

    def head(self) -> bytes:
        """The request's line and headers."""
        headers = list(self.headers)
        names = {name.lower() for name, _ in headers}
        if "host" not in names:
            headers.insert(0, ("Host", "127.0.0.1"))
        if "connection" not in names:
            headers.append(("Connection", "close"))
        if self.declared == -1:
            headers.append(("Transfer-Encoding", "chunked"))
        elif self.body or self.declared is not None or self.method == "POST":
            headers.append(("Content-Length", str(len(self.body) if self.declared is None else self.declared)))
        lines = [f"{self.method} {self.path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers), "", ""]
        return "\r\n".join(lines).encode("latin-1", "replace")

    def document(self) -> dict[str, Any]:
        """The request as JSON."""
        return asdict(self) | {"body": base64.b64encode(self.body).decode()}


@dataclass(frozen=True)
class Reply:
    """The reply to a request.

    Attributes:
        status: HTTP's status; 0: the connection ended without one.
        headers: names in lower case.
        body: without HTTP's chunks.
        seconds: until the end of the answer, or until the client left.
        whole: whether the answer ended as HTTP says that it must.
        left: whether the client went away before the end.
    """

    status: int
    headers: dict[str, str]
    body: bytes
    seconds: float
    whole: bool = True
    left: bool = False


async def exchange(port: int, request: Request, seconds: float) -> Reply:
    """Sends a request to the loopback address and reads the answer.

    Raises:
        TimeoutError: there was no end of the answer within `seconds`.
        OSError: nothing listens on the port.
    """
    begin, received, left = time.monotonic(), b"", False
    async with asyncio.timeout(seconds):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        sending = asyncio.create_task(_send(writer, request))
        try:
            if request.manner == "cut":
                await sending
                left = True
            while not left and (piece := await _read(reader)):
                received += piece
                left = request.manner == "leave" and len(received) >= request.bytes_
        finally:
            sending.cancel()
            writer.transport.abort()
    return _parse(request.method, received, time.monotonic() - begin, left)


async def _send(writer: asyncio.StreamWriter, request: Request) -> None:
    body = request.body[: request.bytes_] if request.manner == "cut" else request.body
    size = max(1, -(-len(body) // PIECES)) if request.manner == "slow" else 1 << 16
    with contextlib.suppress(ConnectionError):  # the server has answered, and reads no more
        writer.write(request.head())
        for at in range(0, len(body), size):
            piece = body[at : at + size]
            writer.write(b"%x\r\n%b\r\n" % (len(piece), piece) if request.declared == -1 else piece)
            await writer.drain()
            await asyncio.sleep(request.pause)
        if request.declared == -1 and request.manner != "cut":
            writer.write(b"0\r\n\r\n")
        await writer.drain()


async def _read(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.read(1 << 16)
    except ConnectionError:
        return b""


class _Bytes:
    """Bytes in the place of a socket for http.client."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def makefile(self, *_: object) -> io.BytesIO:
        return io.BytesIO(self._data)


def _parse(method: str, received: bytes, seconds: float, left: bool) -> Reply:
    response = http.client.HTTPResponse(_Bytes(received), method=method)  # type: ignore[arg-type]
    try:
        response.begin()
    except (http.client.HTTPException, ValueError, OSError):
        return Reply(0, {}, received, seconds, whole=False, left=left)
    headers = {name.lower(): value for name, value in response.getheaders()}
    try:
        body, whole = response.read(), True
    except http.client.IncompleteRead as error:
        body, whole = error.partial, False
    return Reply(response.status, headers, body, seconds, whole, left)
