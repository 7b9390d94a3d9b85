# SPDX-License-Identifier: Apache-2.0
"""Sessions on the execution provider, from models in ONNX's text syntax."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import onnx
import onnx.parser
import onnxruntime
import pytest
from numpy.typing import NDArray

Arrays = dict[str, NDArray[Any]]

HEADER = '<ir_version: 10, opset_import: ["": 21, "com.microsoft": 1]>'


def parse(text: str) -> onnx.ModelProto:
    """A model from its graph in text; a text that begins with "<" brings its own header."""
    model = onnx.parser.parse_model(text if text.lstrip().startswith("<") else f"{HEADER} {text}")
    onnx.checker.check_model(model)
    return model


def reference(model: str | onnx.ModelProto, inputs: Arrays) -> list[NDArray[Any]]:
    """The outputs by ORT's own kernels, unoptimised."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    proto = parse(model) if isinstance(model, str) else model
    session = onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    outputs: list[NDArray[Any]] = session.run(None, inputs)
    return outputs


MakeSession: TypeAlias = Callable[..., onnxruntime.InferenceSession]
Placed: TypeAlias = Callable[..., tuple[onnxruntime.InferenceSession, dict[str, Any]]]


@pytest.fixture
def make_session(ep_devices: list[Any]) -> MakeSession:
    """Makes a session on FlowNPU.

    `options` are the provider's. `by_name`: through providers=[...] instead of add_provider_for_devices(). `strict`:
    fail if a node is left for ORT's CPU provider. `configure`: attributes of SessionOptions. `prepare`: a function that
    is called with the SessionOptions. Where nodes may be left to ONNX Runtime, all others are taken, however small.
    """

    def make(
        model: str | onnx.ModelProto | Path,
        options: dict[str, str] | None = None,
        *,
        by_name: bool = False,
        strict: bool = False,
        configure: dict[str, Any] | None = None,
        prepare: Callable[[onnxruntime.SessionOptions], None] | None = None,
    ) -> onnxruntime.InferenceSession:
        if "on_unsupported" in (options or {}):
            options = {"claim": "all", **(options or {})}
        session_options = onnxruntime.SessionOptions()
        for name, value in (configure or {}).items():
            setattr(session_options, name, value)
        if prepare is not None:
            prepare(session_options)
        if strict:
            session_options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
        if isinstance(model, str):
            model = parse(model)
        source = model.SerializeToString() if isinstance(model, onnx.ModelProto) else str(model)
        if by_name:
            return onnxruntime.InferenceSession(
                source, session_options, providers=["FlowNPUExecutionProvider"], provider_options=[options or {}]
            )
        session_options.add_provider_for_devices(ep_devices, options or {})
        return onnxruntime.InferenceSession(source, session_options)

    return make


@pytest.fixture
def placed(make_session: MakeSession, tmp_path: Path) -> Placed:
    """Makes a session, and returns it with its placement report."""

    def make(
        model: str | onnx.ModelProto | Path, options: dict[str, str] | None = None, **arguments: Any
    ) -> tuple[onnxruntime.InferenceSession, dict[str, Any]]:
        path = tmp_path / "placement.json"
        path.unlink(missing_ok=True)
        session = make_session(model, {**(options or {}), "placement": str(path)}, **arguments)
        return session, json.loads(path.read_text())

    return make
