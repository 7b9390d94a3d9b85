# SPDX-License-Identifier: Apache-2.0
"""Converts models of older ONNX opsets to the opset of FlowNPU's operator definitions."""

from __future__ import annotations

import logging
from contextlib import contextmanager
from typing import TYPE_CHECKING

import onnx
from onnxscript import version_converter

from flownpu.ops.definitions.onnx_function import OPSET

if TYPE_CHECKING:
    from collections.abc import Iterator

    import onnx_ir as ir

# The oldest opset that onnxscript's converter takes.
_OLDEST_OF_ONNXSCRIPT = 18
# Replaces ONNX's domain at ONNX Runtime's own operators in that domain.
_ASIDE = "ai.flownpu.aside"


def raise_opset(model: ir.Model) -> None:
    """Converts a model to the ONNX opset of the operators' definitions, in place, unless it is of a newer one.

    Operators of other domains stay as they are. So do those that ONNX Runtime has in ONNX's domain and ONNX has not, or
    not yet at that opset: SimplifiedLayerNormalization, and LayerNormalization below opset 17, which its optimiser
    writes. ONNX's converter does not know them.

    Raises:
        ValueError: the model does not say of which opset it is, or has an operator that cannot be converted.
    """
    version = model.opset_imports.get("", 0)
    if version < 1:
        raise ValueError("the model does not say of which ONNX opset it is")
    if version >= OPSET:
        return
    # onnxscript's own converter leaves nodes of older opsets as they are; ONNX's, the fallback, converts them.
    with _set_aside(model, version), _complaints() as complaints:
        version_converter.convert_version(model, OPSET, fallback=version < _OLDEST_OF_ONNXSCRIPT)
    reached = model.opset_imports.get("", 0)
    if complaints or reached < OPSET:
        reason = "; ".join(complaints) or f"it could be converted to {reached} only"
        raise ValueError(f"ONNX opset {version}, expected {OPSET} or one that can be converted to it: {reason}")


@contextmanager
def _set_aside(model: ir.Model, version: int) -> Iterator[None]:
    """Gives the operators that ONNX's opset lacks another domain during the conversion."""
    foreign = False
    for node in model.graph.all_nodes():
        if node.domain == "" and not onnx.defs.has(node.op_type, version):
            node.domain, foreign = _ASIDE, True
    if foreign:
        model.opset_imports[_ASIDE] = 1
    try:
        yield
    finally:
        for node in model.graph.all_nodes():  # ONNX's converter makes other nodes
            if node.domain == _ASIDE:
                node.domain = ""
        model.opset_imports.pop(_ASIDE, None)


@contextmanager
def _complaints() -> Iterator[list[str]]:
    """Collects the converter's reasons for leaving nodes, which it only logs, and hides the log from the user."""
    found: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            errors = [record.exc_info[1]] if record.exc_info else list(record.args or ())
            found.extend(str(error) for error in errors if isinstance(error, Exception))

    logger = logging.getLogger("onnxscript.version_converter")
    handler, propagate = Handler(logging.WARNING), logger.propagate
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield found
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagate
