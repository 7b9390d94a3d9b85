# SPDX-License-Identifier: Apache-2.0
"""Models on a device that holds one at a time, such as an NPU whose contexts one model takes."""

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest

from flownpu.errors import FlowNPUError
from flownpu.serve import catalogue
from flownpu.serve.errors import ApiError
from flownpu.serve.processes.protocol import ModelSettings

FULL = "[FlowNPU] the NPU has no room (out of memory): close other programs that use the NPU"


class Process:
    """A model's process; two that are open at a time do not fit on the device."""

    opened: "list[Process]"
    facts = SimpleNamespace(load_seconds=0.0, placement="nowhere")
    is_alive = True

    def __init__(self, settings, _started):
        if settings.folder.name == "broken":
            raise FlowNPUError("broken: no such file")
        if self.opened:
            raise RuntimeError(FULL)
        self.name, self.requests = settings.folder.name, 0
        self.opened.append(self)

    def memory(self):
        return 1

    def close(self):
        self.opened.remove(self)


@pytest.fixture
def models(monkeypatch):
    """A catalogue of models that are not loaded."""
    monkeypatch.setattr(catalogue, "ModelProcess", Process)
    monkeypatch.setattr(Process, "opened", [], raising=False)
    found = catalogue.Catalogue(None)
    for name in ("first", "second", "broken"):
        found.add(name, ModelSettings(Path(name)))
    return found


def test_models_use_full_device_one_after_another(models):
    async def scenario():
        for name in ("first", "second", "first"):
            await models.get(name)
            assert [one.name for one in Process.opened] == [name]

    asyncio.run(scenario())


def test_model_on_full_device_waits_for_no_model_that_answers(models):
    async def scenario():
        (await models.get("first")).requests = 1
        with pytest.raises(ApiError, match="close other programs that use the NPU") as error:
            await models.get("second")
        assert error.value.status == 503
        assert [one.name for one in Process.opened] == ["first"]

    asyncio.run(scenario())


def test_broken_model_closes_no_other(models):
    async def scenario():
        await models.get("first")
        with pytest.raises(ApiError, match="no such file"):
            await models.get("broken")
        assert [one.name for one in Process.opened] == ["first"]

    asyncio.run(scenario())


def test_errors_of_devices_without_room_are_known():
    root = Path(__file__).parents[2] / "ops"
    for place in ("npu/driver/xrt_plugin.cc", "gpu/opencl/status.cc", "gpu/vulkan/loader.cc"):
        assert catalogue.FULL in (root / place).read_text(), place
