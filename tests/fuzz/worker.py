# SPDX-License-Identifier: Apache-2.0
"""A process in which cases are run, so that a crash, a sanitizer's report or a hang is a finding and not the end.

It stays between calls, for importing ONNX Runtime takes longer than thousands of cases, and is started anew after a
finding. Over two pipes go pickled messages, each after its length. What the process writes to its standard output and
error during a call lies in a file, whose end is the report of a crash.
"""

from __future__ import annotations

import ctypes
import faulthandler
import importlib
import os
import pickle
import resource
import select
import signal
import struct
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from collections.abc import Mapping

ROOT = Path(__file__).resolve().parents[2]
LENGTH = struct.Struct("<Q")
# Of what a process wrote before it ended: a report of AddressSanitizer with three stacks of Python has 30 KB.
TAIL_BYTES = 65536
# Importing ONNX Runtime and the library under AddressSanitizer on a busy machine.
START_SECONDS = 120.0
# An absurd size must be refused, and not bring the machine down. AddressSanitizer reserves 16 TB of addresses for
# itself, so that there the limit is on one allocation.
ADDRESS_BYTES = 12 << 30
SANITIZED_ALLOCATION_MB = 4096
PR_SET_PDEATHSIG = 1  # linux/prctl.h


class Raised(Exception):  # noqa: N818  (what happened, not an error of the worker)
    """The function raised: the exception's type and its message, as words."""

    def __init__(self, kind: str, message: str, trace: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind, self.message, self.trace = kind, message, trace


class Ended(Exception):  # noqa: N818
    """The process did not answer; `report` is the end of what it wrote, with a sanitizer's report if there is one."""

    def __init__(self, reason: str, report: str) -> None:
        super().__init__(f"{reason}\n{report}" if report else reason)
        self.reason, self.report = reason, report


class Crashed(Ended):
    """The process ended in a call, by a signal, an exit code or a sanitizer."""


class Hung(Ended):
    """The process did not answer in time and was ended; its report has the Python stack, if it could still write it."""


def sanitizers_environment(library: Path) -> dict[str, str]:
    """What a Python needs that loads a library under the sanitizers, which must be there before Python is."""

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

    `library`: registered with ONNX Runtime before the first call; none: ONNX Runtime alone. `sanitize`: the library was
    built under the sanitizers; none named: build/sanitize's. `environment`: added to this process's. `seconds`: until a
    call that does not answer is a hang.
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
        self._environment = {**os.environ, "ORT_DISABLE_TELEMETRY": "1"}
        if sanitize:
            assert self.library is not None
            self._environment |= sanitizers_environment(self.library)
        self._environment |= environment or {}
        self._process: subprocess.Popen[bytes] | None = None
        self._requests = self._answers = -1
        self._output = tempfile.TemporaryFile()  # noqa: SIM115  (closed with the worker)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._output.close()

    def call(self, function: str, *arguments: Any) -> Any:
        """What `package.module:function` returns for the arguments; all of them can be pickled.

        Raises:
            Raised: the function raised.
            Crashed: the process ended; the next call starts another.
            Hung: it did not answer in time; the next call starts another.
        """
        if self._process is None:
            self._start()
        # The process appends to it, so that what it writes next is at its beginning.
        self._output.truncate(0)
        try:
            self._send((function, arguments))
            succeeded, answer = self._receive(self.seconds)
        except (BrokenPipeError, EOFError):
            raise self._crashed() from None
        except BaseException:
            self.stop()  # An answer that nobody waited for must not be taken for the next one.
            raise
        if not succeeded:
            raise Raised(*answer)
        return answer

    def stop(self) -> None:
        """Ends the process, if there is one."""
        if self._process is None:
            return
        os.close(self._requests)
        os.close(self._answers)
        self._process.kill()
        self._process.wait()
        self._process = None

    def _start(self) -> None:
        child_requests, self._requests = os.pipe()
        self._answers, child_answers = os.pipe()
        self._output.truncate(0)
        command = [sys.executable, "-m", "tests.fuzz.worker", str(child_requests), str(child_answers)]
        command += [str(int(self._limit)), str(self.library or "")]
        self._process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=self._output,
            pass_fds=(child_requests, child_answers),
        )
        os.close(child_requests)
        os.close(child_answers)
        try:
            self._receive(START_SECONDS)
        except EOFError:
            raise self._crashed() from None

    def _crashed(self) -> Crashed:
        assert self._process is not None
        code = self._process.wait()
        self.stop()
        reason = f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return Crashed(reason, self._tail())

    def _tail(self) -> str:
        size = os.fstat(self._output.fileno()).st_size
        return os.pread(self._output.fileno(), TAIL_BYTES, max(0, size - TAIL_BYTES)).decode(errors="replace")

    def _send(self, message: Any) -> None:
        _write(self._requests, pickle.dumps(message, pickle.HIGHEST_PROTOCOL))

    def _receive(self, seconds: float) -> Any:
        end = time.monotonic() + seconds
        length = LENGTH.unpack(self._read(LENGTH.size, end))[0]
        # From a process of ours that we started: a pickle of its own making.
        return pickle.loads(self._read(length, end))  # noqa: S301

    def _read(self, count: int, end: float) -> bytes:
        parts = []
        while count:
            ready, _, _ = select.select([self._answers], [], [], max(0.0, end - time.monotonic()))
            if not ready:
                raise self._hung()
            part = os.read(self._answers, count)
            if not part:
                raise EOFError
            parts.append(part)
            count -= len(part)
        return b"".join(parts)

    def _hung(self) -> Hung:
        assert self._process is not None
        # faulthandler writes the stacks of all threads.
        self._process.send_signal(signal.SIGUSR1)
        time.sleep(0.2)
        self.stop()
        return Hung(f"no answer in {self.seconds:g} s", self._tail())


def _write(descriptor: int, message: bytes) -> None:
    data = memoryview(LENGTH.pack(len(message)) + message)
    while data:
        data = data[os.write(descriptor, data) :]


def _read_exactly(descriptor: int, count: int) -> bytes:
    parts = []
    while count:
        part = os.read(descriptor, min(count, 1 << 20))
        if not part:
            raise EOFError
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def _answer(request: bytes) -> bytes:
    try:
        name, arguments = pickle.loads(request)  # noqa: S301  (from the process that started this one)
        module, function = name.split(":")
        result = getattr(importlib.import_module(module), function)(*arguments)
        return pickle.dumps((True, result), pickle.HIGHEST_PROTOCOL)
    except Exception as error:  # noqa: BLE001  (all of them are answers)
        # str() of a bytes message that is no UTF-8 must not raise here.
        return pickle.dumps((False, (type(error).__name__, str(error), traceback.format_exc())))


def _serve(requests: int, answers: int, limit: bool, library: str) -> None:
    # Ends with the process that started it, also where that was killed.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    # A core of a process under AddressSanitizer takes minutes.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if limit:
        resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_BYTES, ADDRESS_BYTES))
        faulthandler.enable()  # A sanitizer's own handlers tell more.
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    # Appending, so that the file may be cut at its beginning between calls.
    for stream in (1, 2):
        _append(stream)
    if library:
        import onnxruntime

        onnxruntime.register_execution_provider_library("FlowNPUExecutionProvider", library)
    _write(answers, pickle.dumps("ready"))
    while True:
        try:
            length = LENGTH.unpack(_read_exactly(requests, LENGTH.size))[0]
            request = _read_exactly(requests, length)
        except EOFError:
            os._exit(0)
        _write(answers, _answer(request))


def _append(descriptor: int) -> None:
    import fcntl

    fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | os.O_APPEND)


if __name__ == "__main__":
    _serve(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "1", sys.argv[4])
