# SPDX-License-Identifier: Apache-2.0
"""The processes in which chat templates are rendered: `python -m flownpu.generate.template_process`.

A template is a program that came with a model, and a client decides on what it works. Jinja's sandbox keeps it from
files and from Python, and bounds neither time nor memory: in a process of its own it can be ended, and what it
allocates is limited by the system. Nor does it hold Python's lock meanwhile, which the model's process computes under.

A request is one line of JSON with the arguments of `template_environment.render`, an answer one with its text or error.
"""

import contextlib
import json
import signal
import subprocess
import sys
import threading
from typing import Any

from flownpu.errors import FlowNPUError
from flownpu.generate.template_environment import render
from flownpu.system import limit_memory

__all__ = ["RENDERING_SECONDS", "TemplateProcess", "TemplateProcesses", "main"]

RENDERING_SECONDS = 10.0
"""How long one conversation may take. Of 210 public templates the slowest, whose time grows with the square of the
turns, takes 3 to 8 s for 1,000 turns of 1,000 characters, the others 0.1 to 0.5 s."""
RENDERING_MEMORY = 2**30
"""Bytes of address space. Python and Jinja take 60 MB; a conversation of 32 MB, the most that is written, is held some
six times: as JSON, decoded, and as pieces."""
LONGEST = 2**25
"""Characters of a conversation: two for each of the 2^24 tokens that a context may have (convert/decoder_folder.py)."""


class TemplateProcesses:
    """Renders conversations, each in a process that is idle, or in a new one."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Leaves the processes to whoever started them: a forked child must not talk into its parent's conversation."""
        self._idle: list[TemplateProcess] = []

    def start(self) -> None:
        """Starts a process, so that the first conversation need not wait for it."""
        if not self._idle:
            process = TemplateProcess()
            process.start()
            self._idle.append(process)

    def render(self, **arguments: Any) -> str:
        """See `TemplateProcess.render`; threads that render at the same time do not wait for one another."""
        try:
            process = self._idle.pop()
        except IndexError:
            process = TemplateProcess()
        try:
            return process.render(**arguments)
        finally:
            self._idle.append(process)


class TemplateProcess:
    """Renders conversations one at a time; the process starts with the first, and anew after one that was ended."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def render(self, **arguments: Any) -> str:
        """What `template_environment.render` returns for its arguments, except `most`.

        Raises:
            FlowNPUError: the template refuses the conversation, is none, or needs more time or memory than it may.
        """
        try:
            request = json.dumps({**arguments, "most": LONGEST}).encode() + b"\n"
        except (RecursionError, ValueError) as error:  # ValueError: an integer of more digits than Python writes
            raise FlowNPUError(f"the conversation cannot be given to a chat template: {error}") from error
        answer = self._ask(request)
        if "text" in answer:
            return str(answer["text"])
        raise FlowNPUError(f"the model's chat template does not take this conversation: {answer['error']}")

    def start(self) -> None:
        """Starts the process, so that the first conversation need not wait for it."""
        if self._process is None or self._process.poll() is not None:
            command = [sys.executable, "-m", "flownpu.generate.template_process"]
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

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
        late = threading.Event()

        def end() -> None:
            late.set()
            process.kill()

        timer = threading.Timer(RENDERING_SECONDS, end)
        timer.start()
        line = b""
        try:
            with contextlib.suppress(OSError):  # it has ended
                process.stdin.write(request)
                process.stdin.flush()
                line = process.stdout.readline()
        finally:
            timer.cancel()
            # Also at Ctrl-C: the answer would be taken for that to the next request.
            if late.is_set() or not line.endswith(b"\n"):
                self.close()
        if line.endswith(b"\n"):
            return dict(json.loads(line))
        if late.is_set():
            return {"error": f"it took more than {RENDERING_SECONDS:.0f} s, and was given up"}
        return {"error": f"its process ended with code {process.returncode}"}


def answer(line: bytes) -> bytes:
    """The answer to a request."""
    try:
        answer = {"text": render(**json.loads(line))}
        return json.dumps(answer).encode()
    except MemoryError:
        answer = {"error": f"it needs more than {RENDERING_MEMORY >> 20} MiB of memory"}
    except RecursionError:
        answer = {"error": "it calls itself, or is nested, too deeply"}
    except Exception as error:  # noqa: BLE001 whatever the template's code raises, it is told
        place = getattr(error, "lineno", None)
        answer = {"error": f"{error or type(error).__name__}{f' (line {place} of the template)' if place else ''}"}
    return json.dumps(answer).encode()


def main() -> None:
    """Answers requests until its input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process of a terminal's group
    limit_memory(RENDERING_MEMORY)
    for line in sys.stdin.buffer:
        sys.stdout.buffer.write(answer(line) + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
