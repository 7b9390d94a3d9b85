# SPDX-License-Identifier: Apache-2.0
"""The server's end of the process that compiles grammars: it bounds what one grammar may take.

A few hundred bytes of a schema can take GenAI's guidance minutes and all memory. So a separate process compiles each
grammar first, and is ended if the grammar takes too much. A model's process gets only grammars that have passed.
"""

import asyncio
import json
import sys
import time
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import psutil

from flownpu.errors import FlowNPUError
from flownpu.serve.errors import ApiError, invalid
from flownpu.serve.grammars.compiler import Grammar
from flownpu.serve.grammars.form import AnswerForm
from flownpu.system import start_connected

if TYPE_CHECKING:
    import subprocess
    from multiprocessing.connection import Connection

MOST_TEXT = 2**20
"""Characters of a request's schemas as JSON. The largest of published collections of tools have some 100,000."""
SECONDS = 1.0
"""Processor time of one grammar: 50 times that of 2,000 alternatives. As long, other answers of a model may have to
wait when its own process compiles the grammar."""
MEMORY = 256 * 2**20
"""Bytes by which the process may grow for one grammar; 10,000 items in a list take 29 MB."""
WATCH = 0.01
"""Seconds between two looks at the process: it takes a GB in a second at most, so it exceeds its bound little."""
PATIENCE = 60.0
"""Seconds after which a process that computes nothing counts as broken."""
REMEMBERED = 64
"""Grammars that are kept: agents send the same tools with each request."""


class GrammarProcess:
    """Compiles grammars, one at a time; the process is started when it is first needed, and after it was ended."""

    def __init__(self) -> None:
        # One thread talks to the process. A request that is cancelled while it waits for the thread leaves the queue.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="flownpu grammars")
        self._known: OrderedDict[str, Grammar | FlowNPUError] = OrderedDict()
        self._running: tuple[subprocess.Popen[bytes], Connection[Any, Any]] | None = None

    async def compile(self, form: AnswerForm) -> Grammar:
        """The grammar of a form.

        Raises:
            ApiError: no answer can have the form, guidance cannot follow it, or its grammar takes too much (400); or
                the process cannot be started (500).
        """
        if form.schema is None and not form.functions:
            return Grammar()
        parameter = "tools" if form.functions else "response_format"
        try:
            key = json.dumps([form.schema, [[one.name, one.schema] for one in form.functions], repr(form.calls)])
            key += f"{form.must_call}{form.several_calls}{form.marks}"
        except RecursionError:
            raise invalid("the schema is nested too deeply", parameter) from None
        if len(key) > MOST_TEXT:
            raise invalid(f"the schemas have more than {MOST_TEXT} characters, which this server takes", parameter)
        found = self._known.get(key)
        if found is None:
            found = await asyncio.get_running_loop().run_in_executor(self._thread, self._compile, form)
            self._known[key] = found
            while len(self._known) > REMEMBERED:
                self._known.popitem(last=False)
        self._known.move_to_end(key)
        if isinstance(found, FlowNPUError):
            raise invalid(str(found), parameter) from found
        return found

    async def close(self) -> None:
        """Ends the process, and refuses further grammars."""
        await asyncio.to_thread(self._thread.shutdown, cancel_futures=True)
        self._end()

    def _compile(self, form: AnswerForm) -> "Grammar | FlowNPUError":
        try:
            connection, process = self._ready()
            connection.send(form)
        except RecursionError:
            return FlowNPUError("the schema is nested too deeply")
        except (EOFError, OSError, psutil.Error) as error:
            self._end()
            raise ApiError(500, f"the process that compiles grammars cannot be started: {error}") from error
        try:
            answer = self._receive(process)
        except FlowNPUError as error:
            return error
        except (EOFError, OSError, psutil.Error):
            self._end()
            # It would also have ended the model's process.
            return FlowNPUError("GenAI's guidance crashes at the grammar of the schema or the tools: simplify them")
        if isinstance(answer, Grammar | FlowNPUError):
            return answer
        raise ApiError(500, f"the grammar cannot be compiled: {answer}")

    def _ready(self) -> "tuple[Connection[Any, Any], psutil.Process]":
        """The connection to the process, which is started if there is none."""
        if self._running is not None and self._running[0].poll() is not None:
            self._end()
        if self._running is None:
            self._running = start_connected([sys.executable, "-m", "flownpu.serve.grammars.host"])
            self._receive(None)
        return self._running[1], psutil.Process(self._running[0].pid)

    def _receive(self, bounded: psutil.Process | None) -> Any:
        """Waits for the next message of the process, and returns it.

        Args:
            bounded: the process that must stay within the limits of one grammar; None: it has no limits.

        Raises:
            FlowNPUError: the grammar takes too much; the process is ended.
        """
        assert self._running is not None
        connection, begun = self._running[1], time.monotonic()
        seconds, memory = _use(bounded)
        while not connection.poll(WATCH):
            more_seconds, more_memory = (now - then for now, then in zip(_use(bounded), (seconds, memory), strict=True))
            if more_seconds > SECONDS:
                self._end()
                raise FlowNPUError(
                    f"the grammar of the schema or the tools takes more than {SECONDS:g} s to compile: simplify them"
                )
            if more_memory > MEMORY:
                self._end()
                raise FlowNPUError(
                    f"the grammar of the schema or the tools takes more than {MEMORY // 2**20} MiB: simplify them"
                )
            if time.monotonic() - begun > PATIENCE:
                raise TimeoutError(f"it computed nothing in {PATIENCE:.0f} s")
        return connection.recv()

    def _end(self) -> None:
        if self._running is not None:
            process, connection = self._running
            self._running = None
            connection.close()
            process.kill()
            process.wait()


def _use(process: psutil.Process | None) -> tuple[float, int]:
    """Processor time in seconds, and resident bytes; nothing where there are no bounds."""
    if process is None:
        return 0.0, 0
    times = process.cpu_times()
    return times.user + times.system, int(process.memory_info().rss)
