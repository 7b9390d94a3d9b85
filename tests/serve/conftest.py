# SPDX-License-Identifier: Apache-2.0
"""The small models, converted once, and servers over them, each in a process of its own."""

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import openai
import pytest

FIXTURES = Path(__file__).parents[1] / "fixtures"
COMMAND = "import sys; from flownpu.cli import main; sys.exit(main())"


@dataclass
class Server:
    """A running `flownpu serve`."""

    process: subprocess.Popen[str]
    address: str = ""
    said: list[str] = field(default_factory=list)
    """Its log, line by line."""
    _listening: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        threading.Thread(target=self._read, daemon=True).start()
        assert self._listening.wait(180), "".join(self.said)
        assert self.address, "".join(self.said)

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.said.append(line)
            if match := re.search(r"Listening on (http://\S+)", line):
                self.address = match[1]
                self._listening.set()
        self._listening.set()

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    def openai(self, **options: object) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.address}/v1", **{"api_key": "none", "max_retries": 0, **options})  # type: ignore[arg-type]

    def http(self, **options: object) -> httpx.Client:
        return httpx.Client(base_url=self.address, timeout=60, **options)  # type: ignore[arg-type]

    def text(self) -> str:
        return "".join(self.said)

    def end(self, by: signal.Signals = signal.SIGTERM) -> int:
        if self.process.poll() is None:
            self.process.send_signal(by)
        return self.process.wait(60)


@pytest.fixture(scope="session")
def topics(converted: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model that writes text, converted."""
    return Path(shutil.copytree(converted(), tmp_path_factory.mktemp("serve") / "topics"))


@pytest.fixture(scope="session")
def paged_topics(converted: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model that writes text as a paged model, with a KV cache in blocks."""
    return Path(shutil.copytree(converted(paged=True), tmp_path_factory.mktemp("paged") / "topics"))


@pytest.fixture(scope="session")
def shapes(converted: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model that takes images, converted."""
    return Path(shutil.copytree(converted("gemma3-shapes"), tmp_path_factory.mktemp("serve") / "shapes"))


def serve(*arguments: object, python: str | Path = sys.executable, **environment: str) -> Server:
    """Starts `flownpu serve` with arguments."""
    process = subprocess.Popen(
        [python, "-c", COMMAND, "serve", *map(str, arguments), "--port", "0"],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"COLUMNS": "300", "NO_COLOR": "1", "PYTHONUNBUFFERED": "1"} | environment,
    )
    return Server(process)


@pytest.fixture(scope="module")
def start_server() -> Iterator[Callable[..., Server]]:
    """Starts `flownpu serve` with arguments; servers of a module end with it."""
    started: list[Server] = []

    def start(*arguments: object, **environment: str) -> Server:
        started.append(serve(*arguments, **environment))
        return started[-1]

    yield start
    running = [server.process for server in started if server.process.poll() is None]
    for process in running:  # together, since each waits for its own processes to end
        process.terminate()
    for process in running:
        process.wait(60)


@pytest.fixture(scope="session")
def server_of_three(topics: Path, paged_topics: Path, shapes: Path) -> Iterator[Server]:
    """One server for all tests that ask for nothing else than answers: an ordinary model, a paged one, one that sees.

    With bf16 an answer does not depend on the other rows of a product.
    """
    models = (f"topics={topics}", f"paged={paged_topics}", f"seeing={shapes}")
    server = serve(*models, "--context", 1500, "--activations", "bf16")
    yield server
    server.end()
