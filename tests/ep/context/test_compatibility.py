# SPDX-License-Identifier: Apache-2.0
"""ORT's query whether a compiled model runs on a device has the answer of a session with default options."""

from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import pytest
from onnxruntime.capi import _pybind_state as state

from tests.ep.conftest import parse
from tests.ep.context.conftest import Load

Answer = state.OrtCompiledModelCompatibility
LAYOUT = "decoder layers 2, encoder layers 1, operators 1"


def test_compatibility_of_compiled_model_predicts_loading(ep_devices: list[Any], load: Load, tmp_path: Path) -> None:
    onnx.save(parse("g (float[N] x) => (float[N] y) { y = Add (x, x) }"), tmp_path / "model.onnx")
    load(tmp_path / "model.onnx", ep__context_enable="1")
    (text,) = (entry.value for entry in onnx.load(tmp_path / "model_ctx.onnx").metadata_props)
    assert state.get_model_compatibility_for_ep_devices(ep_devices[:1], text) == Answer.EP_SUPPORTED_OPTIMAL
    load(tmp_path / "model_ctx.onnx")


@pytest.mark.parametrize(
    "text",
    [
        "flownpu-context 3; cpu",
        f"flownpu-context 4; emulate, {LAYOUT}, artifacts 0123",
        f"flownpu-context 4; npu, {LAYOUT}, artifacts 0123",
        "flownpu-context 4; gpu, decoder layers 1, operators 1",
        "flownpu-context 4; ",
        "",
    ],
)
def test_compatibility_with_another_devices_or_versions_model_is_unsupported(ep_devices: list[Any], text: str) -> None:
    (processor,) = (device for device in ep_devices if device.device.type == onnxruntime.OrtHardwareDeviceType.CPU)
    assert state.get_model_compatibility_for_ep_devices([processor], text) == Answer.EP_UNSUPPORTED
