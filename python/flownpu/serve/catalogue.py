# SPDX-License-Identifier: Apache-2.0
"""The models that have processes: loaded at their first request, dropped on request or if memory is short."""

import asyncio
import logging
import subprocess
import time
from dataclasses import dataclass

from flownpu.errors import FlowNPUError
from flownpu.serve.errors import ApiError, not_loaded, unknown_model
from flownpu.serve.processes.model_process import ModelProcess
from flownpu.serve.processes.protocol import ModelSettings

PROCESS_BYTES = 80 * 2**20
"""Resident bytes of a model's process without weights and KV caches: Python, numpy, ORT GenAI 0.18, FlowNPU; x86-64."""

FULL = "close other programs that use the "
"""In the provider's errors for an NPU or a GPU without room (ops/npu/driver/xrt_plugin.cc, ops/gpu/*)."""

log = logging.getLogger(__name__)


@dataclass(eq=False)
class _Entry:
    settings: ModelSettings
    process: ModelProcess | None = None
    used: float = 0.0
    """time.monotonic() of the last request."""
    resident: int = 0
    """Resident bytes of the model's process when it was last dropped; 0 if it never was."""
    # Opens the model; all requests that come meanwhile wait for it.
    opening: "asyncio.Task[ModelProcess] | None" = None


class Catalogue:
    """Opens and closes models; used from the event loop's thread only.

    Args:
        memory: resident bytes that all models' processes together may have; None: no limit.
    """

    def __init__(self, memory: int | None) -> None:
        self._memory = memory
        self._entries: dict[str, _Entry] = {}
        self._making_room = asyncio.Lock()
        self.created = int(time.time())

    def add(self, name: str, settings: ModelSettings) -> None:
        """Adds a model, which is not opened yet."""
        self._entries[name] = _Entry(settings)

    async def remove(self, name: str) -> None:
        """Removes a model; requests that it answers are cut short, those that wait for its opening find none."""
        entry = self._entries.pop(name)
        if entry.opening is not None:
            entry.opening.cancel()
            await asyncio.gather(entry.opening, return_exceptions=True)
        if entry.process is not None:
            await asyncio.to_thread(entry.process.close)

    async def drop(self, name: str) -> bool:
        """Closes a model until its next request, unless it answers some now; returns whether it is closed."""
        entry = self._entries[name]
        process = entry.process
        if entry.opening is not None or (process is not None and process.requests):
            return False
        if process is not None:
            entry.process, entry.resident = None, process.memory()
            await asyncio.to_thread(process.close)
        return True

    @property
    def names(self) -> list[str]:
        """All models' names, loaded or not."""
        return list(self._entries)

    def loaded(self) -> dict[str, ModelProcess]:
        """The models that have a process."""
        return {
            name: entry.process
            for name, entry in self._entries.items()
            if entry.process is not None and entry.process.is_alive
        }

    async def get(self, name: str) -> ModelProcess:
        """The process of a model, which is started if there is none.

        Raises:
            ApiError: there is no such model (404); it cannot be opened, or there is no memory for it beside the models
                that answer requests (503).
        """
        entry = self._entries.get(name)
        if entry is None:
            raise unknown_model(name, self.names)
        entry.used = time.monotonic()
        if entry.process is not None and entry.process.is_alive:
            return entry.process
        if entry.opening is None:
            entry.opening = asyncio.create_task(self._open(name, entry))
        opening = entry.opening
        try:
            # Other requests may wait for the same model: a client that disconnects must not cancel its opening.
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            if opening.cancelled() and name not in self._entries:
                raise unknown_model(name, self.names) from None
            raise

    async def _open(self, name: str, entry: _Entry) -> ModelProcess:
        try:
            entry.process = await self._start(name, entry.settings)
            return entry.process
        finally:
            entry.opening = None

    async def _start(self, name: str, settings: ModelSettings) -> ModelProcess:
        async with self._making_room:
            await self._make_room(name)
            log.info("%s: loading", name)
            while True:
                started: list[subprocess.Popen[bytes]] = []
                try:
                    process = await asyncio.to_thread(ModelProcess, settings, started.append)
                    break
                except asyncio.CancelledError:  # the thread waits while its process opens the model
                    for one in started:
                        one.kill()
                    raise
                except (FlowNPUError, RuntimeError) as error:
                    # A device takes some models at a time, an NPU as many as it has contexts: one after another.
                    if FULL in str(error) and await self._drop_oldest(name):
                        continue
                    known = isinstance(error, FlowNPUError)
                    log.exception("%s: cannot be loaded", name, exc_info=None if known else error)
                    raise not_loaded(name, error) from error
        log.info("%s: loaded in %.1f s. %s", name, process.facts.load_seconds, process.facts.placement)
        return process

    async def _make_room(self, name: str) -> None:
        """Closes models that answer nothing, the least recently used first, until model `name` fits."""
        limit = self._memory
        if limit is None:
            return
        # Its files are the weights. The size of its KV caches is known only if it has been loaded before.
        folder = self._entries[name].settings.folder
        files = sum(file.stat().st_size for file in folder.iterdir() if file.is_file())
        needed = max(files + PROCESS_BYTES, self._entries[name].resident)
        while self.loaded() and needed + self.memory() > limit:
            if not await self._drop_oldest(name):
                raise ApiError(
                    503,
                    f"the model {name} is not loaded, and there is no memory for it beside those that answer requests: "
                    "try again later",
                    code="no_memory",
                    headers={"Retry-After": "10"},
                )

    async def _drop_oldest(self, name: str) -> bool:
        """Closes the least recently used model that answers nothing, for model `name`; says whether there was one."""
        idle = [key for key, process in self.loaded().items() if not process.requests]
        if not idle:
            return False
        oldest = min(idle, key=lambda key: self._entries[key].used)
        if closed := await self.drop(oldest):
            log.info("%s: dropped, to make room for %s", oldest, name)
        return closed

    def memory(self) -> int:
        """Resident bytes of all models' processes together."""
        return sum(process.memory() for process in self.loaded().values())

    async def close(self) -> None:
        """Closes all models."""
        opening = [entry.opening for entry in self._entries.values() if entry.opening is not None]
        for task in opening:
            task.cancel()
        await asyncio.gather(*opening, return_exceptions=True)
        processes = [entry.process for entry in self._entries.values() if entry.process is not None]
        await asyncio.gather(*(asyncio.to_thread(process.close) for process in processes))
