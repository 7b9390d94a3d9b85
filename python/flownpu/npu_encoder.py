# SPDX-License-Identifier: Apache-2.0
"""What the NPU's designs need to know of a model's encoder of images.

Whether a graph is one, and of which sizes, is for the execution provider to say (ops/npu/encoder_layers_match.h).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flownpu.aie.designs.bias import bias_column
from flownpu.aie.designs.common import ceil_div
from flownpu.errors import FlowNPUError
from flownpu.model_folder import read_genai_config
from flownpu.onnx_file import load_model, reading

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Dense", "Encoder", "encoder_of_model", "padded_tokens", "read_encoder"]

# As ops/npu/encoder_shape.cc has them: rows and least columns of what a call of GEMM makes, K and N as B holds them.
_ROWS, _COLUMNS, _INNER, _PANEL = 512, 256, 256, 32


@dataclass(frozen=True)
class Dense:
    """A product y [columns] = act(W x + b), of x [inner]; see DenseProjection in ops/npu/encoder_shape.h."""

    inner: int
    columns: int
    bias: bool = True
    gelu: bool = False

    @property
    def rows(self) -> int:
        """K of the call: with a bias, up to the row of the weight that is it."""
        return bias_column(self.inner) + 1 if self.bias else self.inner

    @property
    def padded_rows(self) -> int:
        """Rows of the weight in memory; with a bias, elements of a line of activations."""
        return ceil_div(self.rows, _INNER) * _INNER

    @property
    def padded_columns(self) -> int:
        """N of the call."""
        return max(ceil_div(self.columns, _PANEL) * _PANEL, _COLUMNS)


@dataclass(frozen=True)
class Encoder:
    """What an encoder's calls depend on; see EncoderShape in ops/npu/encoder_shape.h."""

    channels: int
    patch_size: int
    grid: int
    hidden: int
    heads: int
    head_size: int
    feed_forward: int
    layers: int
    pooling: int
    features: int
    epsilon: float
    pooled_epsilon: float
    scale: float

    @property
    def patches(self) -> int:
        """Of an image."""
        return self.grid**2

    @property
    def tokens(self) -> int:
        """Of an image."""
        return (self.grid // self.pooling) ** 2

    @property
    def embedding(self) -> Dense:
        """Of a patch's values."""
        return Dense(self.channels * self.patch_size**2, self.hidden)

    @property
    def projections(self) -> tuple[Dense, Dense, Dense, Dense]:
        """QKV, output, up, down."""
        attention = self.heads * self.head_size
        return (
            Dense(self.hidden, 3 * attention),
            Dense(attention, self.hidden),
            Dense(self.hidden, self.feed_forward, gelu=True),
            Dense(self.feed_forward, self.hidden),
        )

    @property
    def projector(self) -> Dense:
        """Of a pooled token."""
        return Dense(self.hidden, self.features, bias=False)


def padded_tokens(tokens: int) -> int:
    """Rows of activations in memory."""
    return ceil_div(tokens, _ROWS) * _ROWS


def read_encoder(folder: Path) -> Encoder | None:
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


def encoder_of_model(model: Any) -> Encoder:
    """Reads a model (onnx_ir's) of an encoder.

    Raises:
        ValueError: an NPU would not compute it; with the reason that a session tells.
    """
    from flownpu.graph_rewrites.native_graph import describe_encoder  # noqa: PLC0415 needs the extra "convert"

    sizes = describe_encoder(model)
    return Encoder(patch_size=sizes.pop("patch"), **sizes)
