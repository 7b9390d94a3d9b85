# SPDX-License-Identifier: Apache-2.0
"""Asks `flownpu build` and a session of the same folder whether the NPU's array computes its layers.

The build reads the file, the session ONNX Runtime's graph of it.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnxruntime

from flownpu.errors import FlowNPUError
from flownpu.model.folder import onnx_path, read_genai_config
from flownpu.npu.artifacts import build_artifacts
from flownpu.npu.layers import read_decoder

# If one of these stays with ONNX Runtime, its reason explains the missing layers.
_PARTS = {"FlowQKVAttention", "MatMulNBits", "Q4NXMatMul"}


def told_by_build(folder: Path, read: Callable[[Path], Any]) -> str:
    """Why no artifacts are made for a folder's decoder or encoder; empty if they are."""
    try:
        read(folder)
    except FlowNPUError as error:
        return str(error).rpartition("the NPU's designs have no place for its layers: ")[2]
    return ""


def told_by_session(file: Path, devices: list[Any]) -> set[str]:
    """Why the array does not compute a graph's layers, in each partition; empty if it computes them."""
    settings = onnxruntime.SessionOptions()
    settings.log_severity_level = 3
    placement = file.with_suffix(".placement.json")
    given = {"device": "emulate", "on_unsupported": "cpu", "placement": str(placement)}
    settings.add_provider_for_devices(devices, given)
    onnxruntime.InferenceSession(file, settings)
    told = json.loads(placement.read_text())
    for_array = [item for item in told["left"] + told["inlined"] if item["op_type"] in _PARTS]
    reasons = {item["reason"] for item in for_array or told["on_host"]}
    assert any("dispatch" in line for line in told["lowered"]) == (not reasons), told  # it counts its dispatches
    return reasons


def assert_same_decoder(folder: Path, devices: list[Any]) -> str:
    """Asks build and session about a folder's decoder; returns their common reason, or nothing."""
    reason = told_by_build(folder, read_decoder)
    if not reason:
        build_artifacts(folder, context=64)  # into the folder where a session looks for them
    told = told_by_session(onnx_path(folder, read_genai_config(folder)), devices)
    assert told == ({reason} if reason else set()), f"the build says {reason!r}, the session {told}"
    return reason
