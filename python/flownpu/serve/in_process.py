# SPDX-License-Identifier: Apache-2.0
"""Models that run in the server's process: ONNX Runtime releases Python's lock while it computes."""

import asyncio
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from flownpu.errors import FlowNPUError
from flownpu.serve.errors import busy, not_loaded, too_slow
from flownpu.serve.processes.protocol import ModelSettings
from flownpu.serve.settings import Limits


class Opened(Protocol):
    """An open model."""

    placement: str
    """Which devices compute which nodes."""


Model = TypeVar("Model", bound=Opened)
Result = TypeVar("Result")

log = logging.getLogger(__name__)


class _GivenUpError(Exception):
    """The client has left, or the request's time is over."""


@dataclass
class InProcess(ABC, Generic[Model]):
    """One model, loaded when it is first asked for; it computes one request at a time.

    Used from the event loop's thread only.
    """

    name: str
    settings: ModelSettings
    limits: Limits
    requests: int = 0
    """How many wait or are computed."""

    def __post_init__(self) -> None:
        self._lock = asyncio.Lock()
        self._model: Model | None = None

    @abstractmethod
    def open(self, **settings: Any) -> Model:
        """Opens the model, in a thread of its own; `settings` are folder, provider, options and threads.

        Raises:
            FlowNPUError, RuntimeError: it cannot be opened.
        """

    @property
    def is_loaded(self) -> bool:
        """Whether the model is open."""
        return self._model is not None

    async def load(self) -> Model:
        """Opens the model, if it is not.

        Raises:
            ApiError: it cannot be opened.
        """
        if self._model is not None:  # else it would wait for what is computed
            return self._model
        async with self._lock:
            return await self._opened()

    async def drop(self) -> bool:
        """Closes the model until its next request, unless it computes one now; returns whether it is closed."""
        if self.requests or self._lock.locked():
            return False
        self._model = None
        return True

    async def compute(self, work: Callable[[Model, Callable[..., None]], Result]) -> Result:
        """Calls `work` in a thread, once the requests before it are done.

        Args:
            work: gets the model, and a function to call now and then: it raises where the request was given up.

        Raises:
            ApiError: there are too many requests, the time limit is over, or the model cannot be opened.
        """
        if self.requests > self.limits.queue:
            raise busy(f"{self.requests} requests wait or are computed: try again later", self.requests)
        self.requests += 1
        given_up = threading.Event()

        def check(*_: object) -> None:
            if given_up.is_set():
                raise _GivenUpError

        try:
            async with asyncio.timeout(self.limits.request_seconds), self._lock:
                computing = asyncio.create_task(asyncio.to_thread(work, await self._opened(), check))
                try:
                    return await asyncio.shield(computing)
                finally:
                    if not computing.done():
                        log.info("%s: a request was given up: its client left, or its time was over", self.name)
                    # The next request gets the model when this one's thread has ended.
                    given_up.set()
                    await asyncio.gather(computing, return_exceptions=True)
        except TimeoutError:
            raise too_slow(self.limits.request_seconds) from None
        finally:
            self.requests -= 1

    async def _opened(self) -> Model:
        if self._model is None:
            settings, started = self.settings, time.perf_counter()
            log.info("%s: loading", self.name)
            try:
                model = await asyncio.to_thread(
                    self.open,
                    folder=settings.folder,
                    provider=settings.provider,
                    options=settings.options,
                    threads=settings.threads,
                )
            except (FlowNPUError, RuntimeError) as error:
                log.exception("%s: cannot be loaded", self.name, exc_info=None)
                raise not_loaded(self.name, error) from error
            log.info("%s: loaded in %.1f s. %s", self.name, time.perf_counter() - started, model.placement)
            self._model = model
        return self._model
