# SPDX-License-Identifier: Apache-2.0
"""Reads the sizes of a model's decoder and image encoder that the NPU's designs need.

The execution provider's own code finds them in a graph (ops/npu/match/layers.h).
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from flownpu.aie.programs.decoder_shape import DecoderShape
from flownpu.errors import FlowNPUError
from flownpu.generate.image_prompts import TOKENS_PER_IMAGE
from flownpu.model.folder import onnx_path, read_genai_config
from flownpu.model.onnx_file import load_model, reading

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from flownpu._native import EncoderShape

_PURPOSE = "flownpu build MODEL"


@contextmanager
def placing(model: object) -> Iterator[None]:
    """A context that turns a ValueError, the reason why the designs refuse a model, into an error that names the model.

    Raises:
        FlowNPUError: the block raised a ValueError.
    """
    try:
        yield
    except ValueError as error:
        raise FlowNPUError(f"{model}: the NPU's designs have no place for its layers: {error}") from error


def read_decoder(folder: Path) -> DecoderShape:
    """The sizes of the decoder in a model's folder.

    Raises:
        FlowNPUError: there is no decoder, or the NPU's designs have no place for it; the message says why.
        MissingDependencyError: onnx_ir is not installed.
    """
    settings = read_genai_config(folder)
    path = onnx_path(folder, settings)
    model = load_model(path, purpose=_PURPOSE)
    with reading(path), placing(path):
        return decoder_of_model(model, settings["model"]["context_length"])


def decoder_of_model(model: Any, positions: int) -> DecoderShape:
    """The sizes of the decoder in an onnx_ir.Model that is made for `positions` positions.

    Raises:
        ValueError: an NPU would not compute it as a whole; the reason is the one that a session gives.
    """
    from flownpu.graph_rewrites.native_graph import describe_decoder  # noqa: PLC0415 needs the extra "convert"

    return DecoderShape(describe_decoder(model), positions, TOKENS_PER_IMAGE)


def read_encoder(folder: Path) -> EncoderShape | None:
    """The sizes of the image encoder in a model's folder; None: the model takes no images. Raises as `read_decoder`."""
    vision = read_genai_config(folder)["model"].get("vision")
    if not vision:
        return None
    path = folder / str(vision.get("filename", "vision.onnx"))
    model = load_model(path, purpose=_PURPOSE)
    with reading(path), placing(path):
        return encoder_of_model(model)


def encoder_of_model(model: Any) -> EncoderShape:
    """The sizes of the image encoder in an onnx_ir.Model. Raises as `decoder_of_model`."""
    from flownpu.graph_rewrites.native_graph import describe_encoder  # noqa: PLC0415 needs the extra "convert"

    return describe_encoder(model)
