# SPDX-License-Identifier: Apache-2.0
"""What the NPU's designs need to know of a model's encoder of images.

Whether a graph is one, and of which sizes, is for the execution provider to say (ops/npu/match/encoder_layers.h).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flownpu.aie.programs.encoder_shape import EncoderShape
from flownpu.errors import FlowNPUError
from flownpu.model.folder import read_genai_config
from flownpu.model.onnx_file import load_model, reading

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["encoder_of_model", "read_encoder"]


def read_encoder(folder: Path) -> EncoderShape | None:
    """The encoder of a model's folder; None: the model takes no images.

    Raises:
        FlowNPUError: the NPU's designs have no place for it; says why.
        MissingDependencyError: onnx_ir is not installed.
    """
    vision = read_genai_config(folder)["model"].get("vision")
    if not vision:
        return None
    path = folder / str(vision.get("filename", "vision.onnx"))
    model = load_model(path, purpose="flownpu build MODEL")
    with reading(path):
        try:
            return encoder_of_model(model)
        except ValueError as error:
            raise FlowNPUError(f"{path}: the NPU's designs have no place for its layers: {error}") from error


def encoder_of_model(model: Any) -> EncoderShape:
    """Reads a model (onnx_ir's) of an encoder.

    Raises:
        ValueError: an NPU would not compute it; with the reason that a session tells.
    """
    from flownpu.graph_rewrites.native_graph import describe_encoder  # noqa: PLC0415 needs the extra "convert"

    return EncoderShape(**describe_encoder(model))
