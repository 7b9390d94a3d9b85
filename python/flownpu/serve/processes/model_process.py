# SPDX-License-Identifier: Apache-2.0
"""The server's end: starts a model's process, sends it questions and receives the events of its answers."""

import itertools
import queue
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import psutil

from flownpu.errors import FlowNPUError
from flownpu.generate.worker import Deliver, Failed, Finished
from flownpu.serve.processes.protocol import ModelFacts, ModelSettings, Question
from flownpu.system import start_connected

CLOSING_SECONDS = 10.0
"""Seconds after which a process that does not end by itself is killed; one step of a long prompt takes some seconds."""


class ModelProcess:
    """Starts a model's process and returns when the model is open, which takes seconds.

    Args:
        settings: how the model is opened.
        started: is called with the process, which may be killed to end the opening.

    Raises:
        FlowNPUError: the model cannot be opened; or its process ended, and the message says how.
        RuntimeError: GenAI or the provider refuses the model; the message is theirs.
    """

    facts: ModelFacts

    def __init__(
        self, settings: ModelSettings, started: Callable[[subprocess.Popen[bytes]], None] = lambda _: None
    ) -> None:
        self.settings = settings
        self._process, self._connection = start_connected([sys.executable, "-m", "flownpu.serve.processes.host"])
        started(self._process)
        self._numbers = itertools.count()
        self._delivers: dict[int, Deliver] = {}
        self._lock = threading.Lock()  # guards `_delivers` and `_ended`
        self._ended = ""  # the way in which the process ended; empty while it runs
        self._outgoing: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._open()
        self._threads = [
            threading.Thread(target=target, name=f"{target.__name__} {settings.folder.name}", daemon=True)
            for target in (self._send, self._receive)
        ]
        for thread in self._threads:
            thread.start()

    def _open(self) -> None:
        try:
            self._connection.send(self.settings)
            answer = self._connection.recv()
        except (EOFError, OSError):
            answer = FlowNPUError(f"the process of the model in {self.settings.folder} {self._end()}")
        except BaseException:
            self._end()
            raise
        if isinstance(answer, Exception):
            self._end()
            raise answer
        self.facts = answer

    @property
    def requests(self) -> int:
        """How many requests have not ended."""
        return len(self._delivers)

    @property
    def is_alive(self) -> bool:
        """Whether the process can take requests."""
        return not self._ended

    def memory(self) -> int:
        """Resident bytes of the process; of the weights' file the mapped part counts."""
        try:
            return int(psutil.Process(self._process.pid).memory_info().rss)
        except psutil.Error:
            return 0

    def submit(self, question: Question, deliver: Deliver) -> int:
        """Sends a question; returns its number.

        `deliver` is called with the events of `Worker.submit`, and with Failed if the process ends. It is called on a
        thread of this object, or at once if the process has ended before.
        """
        number = next(self._numbers)
        with self._lock:
            if not self._ended:
                self._delivers[number] = deliver
                self._outgoing.put((number, question))
                return number
        deliver(Failed(RuntimeError(self._ended)))
        return number

    def cancel(self, number: int) -> None:
        """Ends a request at its next step; does nothing if it has ended."""
        if number in self._delivers:
            self._outgoing.put((number, None))

    def close(self) -> None:
        """Ends all requests and the process; returns when the process's memory is free."""
        self._end()
        for thread in self._threads:
            thread.join()

    def _send(self) -> None:
        """Sends the queued messages on a separate thread, because sending blocks until the process reads."""
        while (message := self._outgoing.get()) is not None:
            try:
                self._connection.send(message)
            except OSError:
                return  # the connection has ended, which `_receive` reports

    def _receive(self) -> None:
        while True:
            try:
                number, event = self._connection.recv()
            except (EOFError, OSError):
                break
            last = isinstance(event, Finished | Failed)
            with self._lock:
                deliver = self._delivers.pop(number, None) if last else self._delivers.get(number)
            if deliver is not None:
                deliver(event)
        ended = f"the model's process {self._end()}; the next request starts it again"
        with self._lock:
            self._ended = ended
            left, self._delivers = list(self._delivers.values()), {}
        self._outgoing.put(None)
        for deliver in left:
            deliver(Failed(RuntimeError(ended)))

    def _end(self) -> str:
        """Ends the process, if it runs; returns the way in which it ended."""
        try:
            # Wakes the process, and the thread that waits in `_receive`.
            with socket.socket(fileno=self._connection.fileno()) as both:
                both.shutdown(socket.SHUT_RDWR)
                both.detach()
        except (OSError, ValueError):
            pass  # the connection has ended, or was closed before
        try:
            code = self._process.wait(CLOSING_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            return f"did not end in {CLOSING_SECONDS:.0f} s and was killed"
        return f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
