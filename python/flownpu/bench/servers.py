# SPDX-License-Identifier: Apache-2.0
"""Measures servers side by side, in turn (A B A B ...); each is started for its turn and ended after it."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import IO

import psutil

from flownpu.bench.crowd import Answer, Crowd, Service, ask_all, first_model
from flownpu.errors import FlowNPUError, require
from flownpu.system import NEW_GROUP, end_with_children

__all__ = ["CrowdMeasurement", "CrowdMeasurements", "CrowdRun", "Server", "measure_servers", "resident", "running"]

_WAIT_SECONDS = 600.0
"""How long a server may take to load its model."""
_STOP_SECONDS = 30.0
PORT = "{port}"
"""Placeholder for the port in a server's command."""
# Asked before anything is measured, so that memory is mapped, threads run, and everything is compiled.
_WARM_UP = Crowd(1, (32,), 4)


@dataclass(frozen=True)
class Server:
    """How to start a server, or the address of one that runs.

    Attributes:
        name: the server's name in the results.
        command: the command that starts it; PORT in it is replaced by the port.
        url: address of a running server's API, "/v1" included; it is neither started nor ended.
        version: name and version of the server's engine.
    """

    name: str
    command: tuple[str, ...] = ()
    url: str = ""
    version: str = ""


@dataclass
class CrowdRun:
    """The answers to one crowd in one round."""

    seconds: float
    answers: list[Answer]
    resident: int = 0
    """Resident bytes of the server's processes afterwards; 0 if it was not started here."""

    @property
    def rate(self) -> float:
        """New tokens per second of all clients together; the time includes prompts and waiting."""
        return sum(answer.tokens for answer in self.answers) / self.seconds


@dataclass
class CrowdMeasurement:
    """The runs of one server: for each number of clients, one for each round."""

    version: str = ""
    runs: dict[int, list[CrowdRun]] = field(default_factory=dict)


@dataclass
class CrowdMeasurements:
    """What `measure_servers` found, in the order of the servers."""

    crowds: list[Crowd]
    servers: dict[str, CrowdMeasurement]
    failures: dict[str, str] = field(default_factory=dict)
    """The error messages of servers that failed, by the server's name."""
    interrupted: bool = False


Progress = Callable[[str, int, int], None]
"""Called with the name of the server that is asked, the number of crowds that are done and that of all."""


def measure_servers(
    servers: list[Server],
    crowds: list[Crowd],
    *,
    repeats: int,
    vocabulary_size: int,
    progress: Progress = lambda _name, _done, _total: None,
) -> CrowdMeasurements:
    """Asks the servers in turn, `repeats` times; Ctrl-C ends it and keeps what was measured.

    All servers are asked the same prompts; while a server runs, no prompt is repeated.

    Args:
        servers: the servers; the first must not fail.
        crowds: what each server is asked.
        repeats: number of rounds.
        vocabulary_size: tokens are drawn below it.
        progress: called when a server starts, and after each crowd.

    Raises:
        FlowNPUError: the first server failed; the message says how.
    """
    found = CrowdMeasurements(crowds, {server.name: CrowdMeasurement(server.version) for server in servers})
    done, total = 0, repeats * len(servers) * len(crowds)
    try:
        for round_number in range(repeats):
            for server in servers:
                if server.name in found.failures:
                    done += len(crowds)
                    continue
                progress(server.name, done, total)
                try:
                    with running(server) as (service, process):
                        ask_all(service, _WARM_UP, vocabulary_size=vocabulary_size, seed=0)
                        for index, crowd in enumerate(crowds):
                            seed = 1 + index + round_number * len(crowds)
                            seconds, answers = ask_all(service, crowd, vocabulary_size=vocabulary_size, seed=seed)
                            run = CrowdRun(seconds, answers, resident(process))
                            found.servers[server.name].runs.setdefault(crowd.clients, []).append(run)
                            done += 1
                            progress(server.name, done, total)
                except FlowNPUError as error:
                    if server is servers[0]:
                        raise
                    found.failures[server.name] = str(error)
    except KeyboardInterrupt:
        found.interrupted = True
    return found


@contextlib.contextmanager
def running(server: Server) -> Iterator[tuple[Service, psutil.Process | None]]:
    """Starts a server, if it does not run, and ends it afterwards; yields its model and its process (None: it ran).

    Raises:
        FlowNPUError: it ends, or does not answer in ten minutes; the message has the last line that it wrote.
    """
    if server.url:
        yield Service(server.url, first_model(server.url)), None
        return
    port = _free_port()
    command = [part.replace(PORT, str(port)) for part in server.command]
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as said:
        # In a process group of its own the server gets no SIGINT on Ctrl-C, which this process handles.
        process = subprocess.Popen(command, stdout=said, stderr=said, **NEW_GROUP)
        try:
            _wait(server.name, f"http://127.0.0.1:{port}/health", process, said)
            url = f"http://127.0.0.1:{port}/v1"
            yield Service(url, first_model(url)), psutil.Process(process.pid)
        finally:
            end_with_children(process, _STOP_SECONDS)


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def _wait(name: str, url: str, process: subprocess.Popen[bytes], said: IO[str]) -> None:
    httpx = require("httpx", extra="bench", purpose="flownpu bench --serve")
    end = time.monotonic() + _WAIT_SECONDS
    while process.poll() is None:
        with contextlib.suppress(httpx.HTTPError):  # it does not listen yet
            if httpx.get(url, timeout=10, trust_env=False).is_success:  # 503: it loads its model
                return
        if time.monotonic() > end:
            raise FlowNPUError(f"{name} did not answer in {_WAIT_SECONDS:.0f} s; it said last: {_last(said)}")
        time.sleep(0.05)
    raise FlowNPUError(f"{name} ended with exit code {process.returncode}: {_last(said)}")


def _last(said: IO[str]) -> str:
    said.seek(0)
    return (said.read().strip() or "it said nothing").splitlines()[-1]


def resident(process: psutil.Process | None) -> int:
    """Resident bytes of a process and all its descendants; 0 for None."""
    if process is None:
        return 0
    total = 0
    for each in (process, *process.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            total += each.memory_info().rss
    return total
