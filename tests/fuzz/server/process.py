# SPDX-License-Identifier: Apache-2.0
"""The server under test: a process with a limit of memory, which is watched and always ended."""

import asyncio
import contextlib
import re
import socket
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil

from flownpu.errors import FlowNPUError
from flownpu.system import NEW_GROUP, end_with_children

ADDRESS_SPACE = 6 << 30
"""Bytes of address space of each process: a request that would fill the memory ends its model's process instead."""
PORT = "{port}"
"""Placeholder for the port in a server's command."""
_EVERY = 0.25  # seconds between two looks
_START_SECONDS = 600.0  # within which a server loads its models
_STOP_SECONDS = 30.0


@dataclass(frozen=True)
class Memory:
    """Resident bytes of a server's processes at a moment, `seconds` after its start; by what the processes are."""

    seconds: float
    parts: dict[str, int]

    @property
    def total(self) -> int:
        """Bytes of all of them."""
        return sum(self.parts.values())

    def told(self) -> str:
        """The bytes of each process in words."""
        return ", ".join(f"{name} {bytes_ >> 20}" for name, bytes_ in sorted(self.parts.items()))


@dataclass
class Served:
    """A server that runs, and its memory over time."""

    port: int
    process: psutil.Process
    begin: float = field(default_factory=time.monotonic)
    memory: list[Memory] = field(default_factory=list)

    async def watch(self) -> None:
        """Looks at the memory until it is cancelled."""
        while True:
            self.memory.append(Memory(time.monotonic() - self.begin, await asyncio.to_thread(self._parts)))
            await asyncio.sleep(_EVERY)

    def _parts(self) -> dict[str, int]:
        parts: Counter[str] = Counter()
        for each in (self.process, *self.process.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess, IndexError):
                command = each.cmdline()
                module = command[command.index("-m") + 1] if "-m" in command else command[0]
                parts[f"{module} {each.pid}"] += each.memory_info().rss
        return dict(parts)

    @property
    def log(self) -> Path:
        """The file of what it writes, while it runs."""
        return Path(f"/proc/{self.process.pid}/fd/2")

    def open_files(self) -> int:
        """Files, pipes and connections of the server's own process."""
        return int(self.process.num_fds())

    async def requests(self) -> int:
        """Requests that it computes or keeps waiting, as its metrics say."""
        async with httpx.AsyncClient(trust_env=False, timeout=20) as client:
            text = (await client.get(f"http://127.0.0.1:{self.port}/metrics")).text
        return sum(int(float(count)) for count in re.findall(r"^flownpu_requests\{.*\} (\S+)$", text, re.MULTILINE))


@contextlib.contextmanager
def served(command: tuple[str, ...]) -> Iterator[Served]:
    """Starts a server, and ends it with all its processes.

    Raises:
        FlowNPUError: it does not start.
    """
    # With PYTHONFAULTHANDLER a process that crashes writes where it was.
    limited = ("env", "PYTHONFAULTHANDLER=1", "sh", "-c", 'ulimit -v "$0" && exec nice "$@"', str(ADDRESS_SPACE >> 10))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    whole = [part.replace(PORT, str(port)) for part in (*limited, *command)]
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
        process = subprocess.Popen(whole, stdout=log, stderr=log, **NEW_GROUP)
        try:
            _wait(port, process)
            yield Served(port, psutil.Process(process.pid))
        except FlowNPUError as error:
            log.seek(0)
            raise FlowNPUError(f"{error}: {log.read().strip().rpartition(chr(10))[2]}") from error
        finally:
            end_with_children(process, _STOP_SECONDS)


def _wait(port: int, process: subprocess.Popen[bytes]) -> None:
    """Waits until the server says that it has its models (before, it answers 503).

    Raises:
        FlowNPUError: it ended, or needs too long.
    """
    end = time.monotonic() + _START_SECONDS
    while process.poll() is None and time.monotonic() < end:
        with contextlib.suppress(httpx.HTTPError):  # it does not listen yet
            if httpx.get(f"http://127.0.0.1:{port}/health", timeout=10, trust_env=False).is_success:
                return
        time.sleep(0.05)
    raise FlowNPUError(f"expected a server that answers within {_START_SECONDS:.0f} s, got exit code {process.poll()}")
