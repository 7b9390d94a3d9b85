# SPDX-License-Identifier: Apache-2.0
"""Models in the server's process: one request at a time, and requests that are given up."""

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from flownpu.errors import FlowNPUError
from flownpu.serve.errors import ApiError
from flownpu.serve.in_process import InProcess
from flownpu.serve.processes.protocol import ModelSettings
from flownpu.serve.settings import Limits


class Work:
    """A model whose work goes on until it is told to stop, or until the request is given up."""

    placement = "nowhere"

    def __init__(self) -> None:
        self.running = self.most = 0
        self.begun, self.may_end = threading.Event(), threading.Event()

    def work(self, check: Any) -> str:
        self.running += 1
        self.most = max(self.most, self.running)
        self.begun.set()
        try:
            while not self.may_end.wait(0.001):
                check()
            return "done"
        finally:
            time.sleep(0.01)  # a step goes on for a while after its request was given up
            self.running -= 1


class Kind(InProcess[Work]):
    def open(self, **_: Any) -> Work:
        if self.name == "broken":
            raise FlowNPUError("no such file")
        return Work()


def host(name: str = "one", **limits: Any) -> Kind:
    return Kind(name, ModelSettings(Path(name)), Limits(**limits))


def test_request_that_is_given_up_ends_before_the_next_begins() -> None:
    async def run() -> None:
        models = host()
        model = await models.load()
        first = asyncio.create_task(models.compute(Work.work))
        await asyncio.to_thread(model.begun.wait)
        second = asyncio.create_task(models.compute(Work.work))
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        model.may_end.set()
        assert await second == "done"
        assert (model.most, model.running, models.requests) == (1, 0, 0)

    asyncio.run(run())


def test_time_limit_ends_a_request() -> None:
    async def run() -> None:
        models = host(request_seconds=0.05)
        model = await models.load()
        with pytest.raises(ApiError, match="took more than 0 s, and was given up") as given_up:
            await models.compute(Work.work)
        assert (given_up.value.status, model.running, models.requests) == (504, 0, 0)

    asyncio.run(run())


def test_full_queue_refuses_and_broken_model_says_why() -> None:
    async def run() -> None:
        models = host(queue=0)
        model = await models.load()
        first = asyncio.create_task(models.compute(Work.work))
        await asyncio.to_thread(model.begun.wait)
        with pytest.raises(ApiError, match="1 requests wait or are computed: try again later") as refused:
            await models.compute(Work.work)
        assert refused.value.status == 429
        model.may_end.set()
        assert await first == "done"
        with pytest.raises(ApiError, match="the model broken cannot be loaded: no such file") as broken:
            await host("broken").compute(Work.work)
        assert broken.value.status == 503

    asyncio.run(run())
