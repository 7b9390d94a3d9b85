# SPDX-License-Identifier: Apache-2.0
"""ONNX files as onnx_ir reads them; what is wrong with one becomes an error that names it."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from flownpu.errors import FlowNPUError, require

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["load_model", "reading"]

# What Python makes of a node with other inputs or attributes than its operator has, and of a tensor that its file does
# not hold, or no memory would.
_DAMAGE = (
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    OSError,
    RecursionError,
    TypeError,
    ValueError,
)


def load_model(path: Path, *, purpose: str) -> Any:
    """The model (onnx_ir's) of a file; its external data is read when it is asked for.

    Raises:
        FlowNPUError: it is no ONNX model.
        MissingDependencyError: onnx_ir is not installed; `purpose` is what needs it.
    """
    ir = require("onnx_ir", extra="convert", purpose=purpose)
    try:
        return ir.load(path)
    except Exception as error:
        # The parser is protobuf's, and so is its error: no dependency of ours.
        raise FlowNPUError(f"{path} is not an ONNX model ({error}): export or convert it again") from error


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Reads the nodes and tensors of a model's graph: a graph that is damaged is an error that names its file.

    Raises:
        FlowNPUError: an input, an attribute or a tensor is missing or something else.
    """
    try:
        yield
    except _DAMAGE as error:
        raise FlowNPUError(
            f"{path}: the graph is damaged, or of a form that is not known: {type(error).__name__}: {error}; export "
            "or convert it again"
        ) from error
