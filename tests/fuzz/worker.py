# SPDX-License-Identifier: Apache-2.0
"""A process that runs cases, so that a crash, a sanitizer's report or a hang is a finding and does not end the
campaign.

Importing ONNX Runtime, above all under AddressSanitizer, takes longer than thousands of cases. So a *server* does it
once; a fork of it, the *runner*, answers calls until a case ends it, and then the server says so and forks the next
one. What a runner writes to its standard output and error during a call goes to a file, whose end is the report of a
crash.
"""

import ctypes
import faulthandler
import fcntl
import importlib
import os
import pickle
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

import psutil

ROOT = Path(__file__).resolve().parents[2]
# Bytes that are kept from the end of a process's output: AddressSanitizer's report with three Python stacks is 30 KB.
TAIL_BYTES = 65536
# A limit on memory, so that absurd sizes are refused and do not bring the machine down. AddressSanitizer reserves 16 TB
# of addresses for itself; there a single allocation is limited instead.
ADDRESS_BYTES = 12 << 30
SANITIZED_ALLOCATION_MB = 4096
PR_SET_PDEATHSIG = 1  # linux/prctl.h


class Raised(Exception):  # noqa: N818  (what happened, not an error of the worker)
    """The function raised an exception; here are its type, its message and its traceback as text."""

    def __init__(self, kind: str, message: str, trace: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind, self.message, self.trace = kind, message, trace


class Ended(Exception):  # noqa: N818
    """The process did not answer; `report` is the end of its output, with a sanitizer's report if there is one."""

    def __init__(self, reason: str, report: str) -> None:
        super().__init__(f"{reason}\n{report}" if report else reason)
        self.reason, self.report = reason, report


class Crashed(Ended):
    """The process ended during a call, by a signal, an exit or a sanitizer."""


class Hung(Ended):
    """The process did not answer in time and was killed; its report has the Python stacks if it could write them."""


@contextmanager
def _all_addresses() -> Iterator[None]:
    """Lifts this process's limit on addresses for processes started meanwhile: AddressSanitizer needs all addresses."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def sanitizers_environment(library: Path) -> dict[str, str]:
    """Variables for the environment of a Python that loads a sanitized library: sanitizers must be loaded before it."""

    def runtime(name: str) -> str:
        return subprocess.run(
            ["g++", f"-print-file-name={name}"], check=True, capture_output=True, text=True
        ).stdout.strip()

    return {
        "LD_PRELOAD": f"{runtime('libasan.so')} {runtime('libstdc++.so.6')}",
        "ASAN_OPTIONS": f"detect_leaks=0:allocator_may_return_null=1:max_allocation_size_mb={SANITIZED_ALLOCATION_MB}",
        "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
        "FLOWNPU_TESTING_DIR": str(library.parent),
    }


class Worker:
    """A process that calls functions by name; a context manager, started by the first call.

    Args:
        library: registered with ONNX Runtime before the first call; None: ONNX Runtime alone.
        sanitize: whether the library was built with the sanitizers; `library` is then build/sanitize's by default.
        environment: environment variables, added to this process's.
        seconds: time after which a call without an answer is a hang.
    """

    def __init__(
        self,
        library: Path | str | None = None,
        *,
        sanitize: bool = False,
        environment: Mapping[str, str] | None = None,
        seconds: float = 60.0,
    ) -> None:
        if sanitize and library is None:
            library = ROOT / "build/sanitize/libflownpu_ep.so"
        self.library = Path(library).resolve() if library is not None else None
        self.seconds = seconds
        self._limit = not sanitize
        self._environment = dict(os.environ)
        # If this process is under the sanitizers, only workers that need them are, too.
        if "libasan" in self._environment.get("LD_PRELOAD", ""):
            del self._environment["LD_PRELOAD"]
        # The server forks, so it must have no threads of its own, which a fork would not have.
        self._environment |= {"ORT_DISABLE_TELEMETRY": "1", "OPENBLAS_NUM_THREADS": "1"}
        if sanitize:
            assert self.library is not None
            self._environment |= sanitizers_environment(self.library)
        self._environment |= environment or {}
        self._server: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None  # with the server and its runner
        self._output = tempfile.TemporaryFile()  # noqa: SIM115  (closed with the worker)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._output.close()

    def call(self, function: str, *arguments: Any) -> Any:
        """The result of `package.module:function` for the arguments; it and they must be picklable.

        Raises:
            Raised: the function raised.
            Crashed: the process ended; the next call starts another one.
            Hung: the process did not answer in time; the next call starts another one.
        """
        connection = self._connection or self._start()
        # The runner appends to this file, so that its next output is at the beginning.
        self._output.truncate(0)
        try:
            connection.send((function, arguments))
            kind, answer = connection.recv() if connection.poll(self.seconds) else ("nothing", None)
        except (OSError, EOFError, pickle.UnpicklingError):
            self.stop()  # a part of an answer, or a server that has ended
            raise Crashed("ended while it answered", self._tail()) from None
        except BaseException:
            self.stop()  # A late answer must not be taken for that of the next call.
            raise
        if kind == "nothing":
            raise self._hung(connection)
        if kind == "raised":
            raise Raised(*answer)
        if kind == "ended":
            reason = f"ended by {signal.Signals(-answer).name}" if answer < 0 else f"ended with exit code {answer}"
            raise Crashed(reason, self._tail())
        return answer

    def stop(self) -> None:
        """Ends server and runner, if they run."""
        if self._connection is not None and self._server is not None:
            self._connection.close()
            self._server.kill()  # the kernel then kills the runner
            self._server.wait()
            self._connection = self._server = None

    def _start(self) -> Connection:
        """Starts a server, and returns the connection with its first runner."""
        ours, theirs = socket.socketpair()
        self._output.truncate(0)
        command = [sys.executable, "-m", "tests.fuzz.worker", str(theirs.fileno())]
        command += [str(int(self._limit)), str(self.library or "")]
        with _all_addresses(), theirs:
            self._server = subprocess.Popen(
                command,
                cwd=ROOT,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=self._output,
                pass_fds=(theirs.fileno(),),
            )
        self._connection = Connection(ours.detach())
        try:
            self._connection.recv()  # it is ready
        except (OSError, EOFError):
            self.stop()
            raise Crashed("ended before its first call", self._tail()) from None
        return self._connection

    def _hung(self, connection: Connection) -> Hung:
        """Kills the runner; its report has the stacks of all threads, which faulthandler writes."""
        assert self._server is not None
        for runner in psutil.Process(self._server.pid).children():
            with suppress(psutil.NoSuchProcess):
                runner.send_signal(signal.SIGUSR1)
                time.sleep(0.2)
                runner.kill()
        if not connection.poll(self.seconds) or connection.recv()[0] != "ended":
            self.stop()  # it has answered after all
        return Hung(f"no answer in {self.seconds:g} s", self._tail())

    def _tail(self) -> str:
        size = os.fstat(self._output.fileno()).st_size
        return os.pread(self._output.fileno(), TAIL_BYTES, max(0, size - TAIL_BYTES)).decode(errors="replace")


def _run(connection: Connection) -> None:
    """Answers calls until the other end of the connection is closed."""
    _end_with_parent()
    with suppress(EOFError, BrokenPipeError):
        while True:
            name, arguments = connection.recv()
            module, function = name.split(":")
            try:
                connection.send(("answered", getattr(importlib.import_module(module), function)(*arguments)))
            except Exception as error:  # noqa: BLE001  (every exception is an answer)
                connection.send(("raised", (type(error).__name__, str(error), traceback.format_exc())))
    os._exit(0)


def _serve(connection: Connection, limit: bool, library: str) -> None:
    _end_with_parent()
    # No core dumps: that of a process under AddressSanitizer takes minutes.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if limit:
        resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_BYTES, ADDRESS_BYTES))
        faulthandler.enable()  # Not with a sanitizer, whose own handlers report more.
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    for stream in (1, 2):  # Append mode, so that the file may be truncated between calls.
        fcntl.fcntl(stream, fcntl.F_SETFL, fcntl.fcntl(stream, fcntl.F_GETFL) | os.O_APPEND)
    import onnxruntime

    if library:
        onnxruntime.register_execution_provider_library("FlowNPUExecutionProvider", library)
    with suppress(BrokenPipeError):
        connection.send(("ready", None))
        while True:
            if (runner := os.fork()) == 0:
                _run(connection)
            _, status = os.waitpid(runner, 0)
            connection.send(("ended", os.waitstatus_to_exitcode(status)))


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    _serve(Connection(int(sys.argv[1])), sys.argv[2] == "1", sys.argv[3])
