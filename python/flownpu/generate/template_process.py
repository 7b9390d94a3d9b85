# SPDX-License-Identifier: Apache-2.0
"""The processes in which chat templates are read and rendered: `python -m flownpu.generate.template_process`.

A template is a program that came with a model, and clients choose its input. Jinja's sandbox keeps it from files and
from Python, but bounds neither time nor memory. A separate process can be killed, and the system limits its memory. It
also does not hold the interpreter lock (GIL) of the model's process.

A request is a line of JSON with the name and the arguments of a function of `template_environment`; an answer is a line
with its result or its error.
"""

import contextlib
import functools
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from flownpu.errors import FlowNPUError
from flownpu.system import limit_memory

RENDERING_SECONDS = 10.0
"""Limit on CPU seconds for one conversation. The slowest of 210 public templates, whose time grows with the square of
the turns, takes 3.4 s for 1,000 turns of 1,000 characters; all but 8 take less than 0.2 s."""
STARTING_SECONDS = 2.0
"""CPU seconds beside these for a new process, which imports Jinja; alone it takes some 0.2."""
WAITING = 6
"""The limit on the clock is this many times RENDERING_SECONDS, as the machine may be busy with other work."""
RENDERING_MEMORY = 2**30
"""Bytes of address space. Python and Jinja take 60 MB; the longest conversation, 32 MB as ASCII, is held some
six times: as JSON, decoded, and as pieces."""
LONGEST = 2**25
"""Characters of a conversation: two for each of the 2^24 tokens that a context may have (convert/decoder_folder.py)."""


@functools.cache
def _work() -> dict[str, Callable[..., Any]]:
    """The functions that a process calls, by name. Only these processes import Jinja, which takes 40 ms."""
    from flownpu.generate.template_environment import render, variables  # noqa: PLC0415

    # Jinja evaluates constant expressions even while it finds the names in a template.
    return {"render": partial(render, most=LONGEST), "variables": lambda template: sorted(variables(template))}


class TemplateProcesses:
    """Gives work to a process that is idle, or to a new one."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Drops the processes without ending them: a forked child must not talk to those of its parent."""
        self._idle: list[TemplateProcess] = []

    def start(self) -> None:
        """Starts a process, so that the first conversation need not wait for it."""
        if not self._idle:
            process = TemplateProcess()
            process.start()
            self._idle.append(process)

    def ask(self, work: str, **arguments: Any) -> Any:
        """See `TemplateProcess.ask`; threads that ask at the same time do not wait for one another."""
        try:
            process = self._idle.pop()
        except IndexError:
            process = TemplateProcess()
        try:
            return process.ask(work, **arguments)
        finally:
            self._idle.append(process)


class TemplateProcess:
    """Answers one request at a time; the process starts with the first, and anew after one that was ended."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._seconds = 0.0  # CPU seconds that the process has taken, when it last answered

    def ask(self, work: str, **arguments: Any) -> Any:
        """Calls a function of `_work` in the process, and returns its result.

        Raises:
            FlowNPUError: the template refuses, is none, or needs more time or memory than it may.
        """
        try:
            request = json.dumps([work, arguments]).encode() + b"\n"
        except (RecursionError, ValueError) as error:  # ValueError: an integer has more digits than Python writes
            raise FlowNPUError(str(error)) from error
        answer = self._ask(request)
        if "error" in answer:
            raise FlowNPUError(answer["error"])
        return answer["value"]

    def start(self) -> None:
        """Starts the process, so that the first conversation need not wait for it."""
        if self._process is None or self._process.poll() is not None:
            command = [sys.executable, "-m", "flownpu.generate.template_process"]
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            self._seconds = STARTING_SECONDS

    def close(self) -> None:
        """Ends the process."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _ask(self, request: bytes) -> dict[str, Any]:
        self.start()
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        answered, late = threading.Event(), threading.Event()
        end = self._seconds + RENDERING_SECONDS
        threading.Thread(target=_watch, args=(process, end, answered, late), daemon=True).start()
        line = b""
        try:
            with contextlib.suppress(OSError):  # it has ended
                process.stdin.write(request)
                process.stdin.flush()
                line = process.stdout.readline()
        finally:
            answered.set()
            # Also at Ctrl-C: the late answer would be taken for the next request's.
            if late.is_set() or not line.endswith(b"\n"):
                self.close()
        if line.endswith(b"\n"):
            answer = dict(json.loads(line))
            self._seconds = answer.get("seconds", self._seconds)
            return answer
        if late.is_set():
            return {"error": f"it took more than {RENDERING_SECONDS:.0f} s, and was given up"}
        return {"error": f"its process ended with code {process.returncode}"}


def _watch(process: "subprocess.Popen[bytes]", end: float, answered: threading.Event, late: threading.Event) -> None:
    """Kills the process and sets `late` if it has not answered when it has taken `end` CPU seconds in all."""
    asked = time.monotonic()
    if answered.wait(RENDERING_SECONDS):  # it has one thread, which cannot have taken more
        return
    import psutil  # noqa: PLC0415 few conversations come here, and it takes 30 ms

    with contextlib.suppress(psutil.NoSuchProcess):
        computing = psutil.Process(process.pid)
        while (left := end - sum(computing.cpu_times()[:2])) > 0:  # user, system
            if time.monotonic() - asked > WAITING * RENDERING_SECONDS:
                break
            if answered.wait(max(left, 0.01)):
                return
        late.set()
        process.kill()


def answer(line: bytes) -> bytes:
    """The answer to a request."""
    try:
        work, arguments = json.loads(line)
        value = _work()[work](**arguments)
        return json.dumps({"value": value, "seconds": time.process_time()}).encode()
    except MemoryError:
        answer = {"error": f"it needs more than {RENDERING_MEMORY >> 20} MiB of memory"}
    except RecursionError:
        answer = {"error": "it calls itself, or is nested, too deeply"}
    except Exception as error:  # noqa: BLE001 whatever the template's code raises is the answer
        place = getattr(error, "lineno", None)
        answer = {"error": f"{error or type(error).__name__}{f' (line {place} of the template)' if place else ''}"}
    return json.dumps(answer).encode()


def main() -> None:
    """Answers requests until its input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process of a terminal's group
    limit_memory(RENDERING_MEMORY)
    _work()
    for line in sys.stdin.buffer:
        sys.stdout.buffer.write(answer(line) + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
