# SPDX-License-Identifier: Apache-2.0
"""What the NPU's designs need to know of a model's decoder, and of its encoder of images.

Whether a graph has one, and of which sizes, is for the execution provider to say (ops/npu/match/layers.h).
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from flownpu.aie.programs.decoder_shape import DecoderShape
from flownpu.aie.programs.encoder_shape import EncoderShape
from flownpu.errors import FlowNPUError
from flownpu.generate.image_prompts import TOKENS_PER_IMAGE
from flownpu.model.folder import onnx_path, read_genai_config
from flownpu.model.onnx_file import load_model, reading

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["decoder_of_model", "encoder_of_model", "placing", "read_decoder", "read_encoder"]

_PURPOSE = "flownpu build MODEL"


@contextmanager
def placing(model: object) -> Iterator[None]:
    """Says whose layers they are that the NPU's designs have no place for.

    Raises:
        FlowNPUError: in the place of a ValueError, which says why.
    """
    try:
        yield
    except ValueError as error:
        raise FlowNPUError(f"{model}: the NPU's designs have no place for its layers: {error}") from error


def read_decoder(folder: Path) -> DecoderShape:
    """The decoder of a model's folder.

    Raises:
        FlowNPUError: there is none, or the NPU's designs have no place for it; says why.
        MissingDependencyError: onnx_ir is not installed.
    """
    settings = read_genai_config(folder)
    path = onnx_path(folder, settings)
    model = load_model(path, purpose=_PURPOSE)
    with reading(path), placing(path):
        return decoder_of_model(model, settings["model"]["context_length"])


def decoder_of_model(model: Any, positions: int) -> DecoderShape:
    """Reads a model (onnx_ir's) of a decoder that is made for so many positions.

    Raises:
        ValueError: an NPU would not compute it; with the reason that a session tells.
    """
    from flownpu.graph_rewrites.native_graph import describe_decoder  # noqa: PLC0415 needs the extra "convert"

    return DecoderShape.of(describe_decoder(model), positions, TOKENS_PER_IMAGE)


def read_encoder(folder: Path) -> EncoderShape | None:
    """The encoder of a model's folder; None: the model takes no images. Raises as `read_decoder`."""
    vision = read_genai_config(folder)["model"].get("vision")
    if not vision:
        return None
    path = folder / str(vision.get("filename", "vision.onnx"))
    model = load_model(path, purpose=_PURPOSE)
    with reading(path), placing(path):
        return encoder_of_model(model)


def encoder_of_model(model: Any) -> EncoderShape:
    """Reads a model (onnx_ir's) of an encoder. Raises as `decoder_of_model`."""
    from flownpu.graph_rewrites.native_graph import describe_encoder  # noqa: PLC0415 needs the extra "convert"

    return EncoderShape(**describe_encoder(model))
