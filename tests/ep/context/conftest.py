# SPDX-License-Identifier: Apache-2.0
"""Compiled models."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import onnxruntime
import pytest

Load: TypeAlias = Callable[..., onnxruntime.InferenceSession]


@pytest.fixture
def load(ep_devices: list[Any]) -> Load:
    """Makes a session on FlowNPU with entries of the session's configuration, whose dots are written as two bars."""

    def make(model: Path | bytes, **entries: str) -> onnxruntime.InferenceSession:
        configuration = onnxruntime.SessionOptions()
        for key, value in entries.items():
            configuration.add_session_config_entry(key.replace("__", "."), value)
        configuration.add_provider_for_devices(ep_devices, {})
        return onnxruntime.InferenceSession(model if isinstance(model, bytes) else str(model), configuration)

    return make
