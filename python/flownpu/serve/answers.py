# SPDX-License-Identifier: Apache-2.0
"""The answers to one request while they are computed: admission, time limit, cancelling and measurements."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from opentelemetry.trace import Span

from flownpu.errors import ContextLengthError, FlowNPUError
from flownpu.generate.worker import Event, Failed, Finished, Piece, Started
from flownpu.serve.errors import ApiError, busy, invalid, too_long, too_slow
from flownpu.serve.metrics import Metrics, Times
from flownpu.serve.processes.model_process import ModelProcess
from flownpu.serve.processes.protocol import Question
from flownpu.serve.settings import ServerSettings
from flownpu.serve.tracing import begin_span, end_span, fail_span


@dataclass(eq=False)
class Answers:
    """Asks one model some questions; iterating yields pairs of a question's index and an event of its answer.

    `begin` returns when the first piece of an answer has come, so that an error in a request can still set the
    response's status code; or when a client has waited so long that it should hear that the server is alive.
    """

    name: str
    """The model's name, as clients know it."""
    opening: Coroutine[Any, Any, ModelProcess]
    """Opens the model's process, if it is not open."""
    questions: Sequence[Question]
    settings: ServerSettings
    metrics: Metrics
    times: list[Times] = field(default_factory=list)
    finished: dict[int, Finished] = field(default_factory=dict)
    prompt_tokens: int = 0
    """Tokens of the first question that was begun."""
    _process: ModelProcess | None = None
    _beginning: "asyncio.Task[None] | None" = None
    _events: "asyncio.Queue[tuple[int, Event]]" = field(default_factory=asyncio.Queue)
    _spans: list[Span] = field(default_factory=list)
    _numbers: list[int] = field(default_factory=list)
    _ahead: list[tuple[int, Event]] = field(default_factory=list)
    _deadline: float = 0.0

    async def begin(self, patience: float | None = None) -> None:
        """Sends the questions, and waits for the first piece of an answer, but at most `patience` seconds.

        Raises:
            ApiError: the model cannot be opened, the queue is full, a question cannot be answered, or the time limit is
                over. What happens after the patience, iterating raises.
        """
        self._beginning = asyncio.create_task(self._begin())
        try:
            if (await asyncio.wait({self._beginning}, timeout=patience))[0]:
                self._beginning.result()
        except BaseException:
            self.end()
            raise

    async def _begin(self) -> None:
        self._process = await self.opening
        self._admit(self._process)
        loop = asyncio.get_running_loop()
        self._deadline = loop.time() + self.settings.limits.request_seconds
        for index, question in enumerate(self.questions):
            self.times.append(Times(time.perf_counter()))
            self._spans.append(begin_span(self.name, question))
            self._numbers.append(self._process.submit(question, partial(self._deliver, loop, index)))
        while not self._ahead or not isinstance(self._ahead[-1][1], Piece | Finished):
            self._ahead.append(await self._next())

    def end(self) -> None:
        """Cancels the answers that have not ended."""
        if self._beginning is not None and not self._beginning.cancel() and not self._beginning.cancelled():
            self._beginning.exception()  # else asyncio would log one that nobody asked for
        for index, number in enumerate(self._numbers):
            if index not in self.finished and self._process is not None:
                self._process.cancel(number)
                self.finished[index] = Finished("cancelled", 0, 0, 0)
                self.metrics.ended(self.name, "cancelled")
                end_span(self._spans[index], self.finished[index], self.times[index])

    async def __aiter__(self) -> AsyncIterator[tuple[int, Piece | Finished]]:
        """The pieces and ends of all answers, those that `begin` received first.

        Raises:
            ApiError: the model failed, or the time limit is over; or see `begin`.
        """
        assert self._beginning is not None
        await self._beginning
        last = 0
        while last < len(self.questions):
            index, event = self._ahead.pop(0) if self._ahead else await self._next()
            if isinstance(event, Piece | Finished):
                last += isinstance(event, Finished)
                yield index, event

    def _admit(self, process: ModelProcess) -> None:
        count, facts = len(self.questions), process.facts
        capacity = facts.slots + self.settings.limits.queue
        if count > capacity:
            raise invalid(f"the request asks for {count} answers, and the server takes {capacity} at a time")
        if process.requests + count > capacity:
            self.metrics.ended(self.name, "refused")
            seconds = self.metrics.usual_seconds(self.name) * process.requests / facts.slots
            raise busy(f"{process.requests} requests wait or are computed: try again later", seconds)

    def _deliver(self, loop: asyncio.AbstractEventLoop, index: int, event: Event) -> None:
        """Passes an event from the thread that reads the model's process to the event loop."""
        with contextlib.suppress(RuntimeError):  # the loop is closed, so nobody waits for events
            loop.call_soon_threadsafe(self._events.put_nowait, (index, event))

    async def _next(self) -> tuple[int, Event]:
        try:
            async with asyncio.timeout_at(self._deadline):
                await asyncio.sleep(0)  # lets the timeout act if events come faster than they are sent
                index, event = await self._events.get()
        except TimeoutError:
            raise too_slow(self.settings.limits.request_seconds) from None
        self._measure(index, event)
        if isinstance(event, Failed):
            if isinstance(event.error, FlowNPUError):
                if isinstance(event.error, ContextLengthError):
                    raise too_long(str(event.error), self.questions[index].parameter) from event.error
                raise invalid(str(event.error)) from event.error
            raise ApiError(500, str(event.error), code="model_failed") from event.error
        return index, event

    def _measure(self, index: int, event: Event) -> None:
        times, now = self.times[index], time.perf_counter()
        if isinstance(event, Started):
            times.started = now
            self.prompt_tokens = self.prompt_tokens or event.prompt_tokens
        elif isinstance(event, Piece):
            times.first = times.first or now
            times.last = now
        elif isinstance(event, Finished):
            self.finished[index] = event
            if not self.questions[index].only_counts:
                self.metrics.answered(self.name, event, times)
            end_span(self._spans[index], event, times)
        else:
            self.finished[index] = Finished("cancelled", 0, 0, 0)
            self.metrics.ended(self.name, "failed")
            fail_span(self._spans[index], event.error)
