# SPDX-License-Identifier: Apache-2.0
"""Reads graphs of converted models for the NPU's designs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flownpu.onnx_file import load_model

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["agreed", "integer", "load_graph", "number", "text"]


def load_graph(path: Path) -> Any:
    """The graph (onnx_ir's) of a file.

    Raises:
        FlowNPUError: it is no ONNX model.
        MissingDependencyError: onnx_ir is not installed.
    """
    return load_model(path, purpose="flownpu build MODEL").graph


def integer(node: Any, name: str, default: int | None = None) -> int:
    """An attribute; ValueError if it has neither that nor a default."""
    attribute = node.attributes.get(name)
    if attribute is not None:
        return int(attribute.as_int())
    if default is None:
        raise ValueError(f"expected {node.op_type} {node.name} to have {name}")
    return default


def number(node: Any, name: str, default: float) -> float:
    """An attribute, or its default."""
    attribute = node.attributes.get(name)
    return default if attribute is None else float(attribute.as_float())


def text(node: Any, name: str, default: str) -> str:
    """An attribute, or its default."""
    attribute = node.attributes.get(name)
    return default if attribute is None else str(attribute.as_string())


def agreed(what: str, values: list[Any]) -> Any:
    """What all are; ValueError if they differ."""
    if len(set(values)) != 1:
        raise ValueError(f"expected the same {what} everywhere, got {', '.join(map(str, dict.fromkeys(values)))}")
    return values[0]
