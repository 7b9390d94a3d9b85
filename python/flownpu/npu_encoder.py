# SPDX-License-Identifier: Apache-2.0
"""What the NPU's designs need to know of a converted model's encoder of images.

It is read from the graph, as the execution provider reads it (ops/npu/encoder_layers_match.h):

- The *layers* are the attention nodes (FlowQKVAttention, not causal), in the graph's order. `heads` (num_heads),
  `head_size` and `scale` (0: 1 / sqrt(head size)) are theirs.
- `patch_size` and `hidden` are of the convolution's weight [hidden, C, p, p]; `grid` is the root of the number of
  positions that are added after it.
- `feed_forward` is the length of what GELU reads: M of the product with activation = gelu_tanh, or before a Gelu.
- `epsilon` is that of the layer norms, `pooled_epsilon` that of the SimplifiedLayerNormalization after the pooling.
- `pooling` is the average pooling's kernel; `features` the length of the graph's first output.

Whether nodes follow one another as the array has them is for the execution provider to say.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from flownpu.aie.designs.bias import bias_column
from flownpu.aie.designs.common import ceil_div
from flownpu.errors import FlowNPUError
from flownpu.model_folder import read_genai_config
from flownpu.npu_graph import agreed, integer, load_graph, number, text
from flownpu.onnx_file import reading

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

__all__ = ["Dense", "Encoder", "encoder_of_graph", "padded_tokens", "read_encoder"]

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
    """What an encoder's calls depend on; see the module, and EncoderShape in ops/npu/encoder_shape.h."""

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
    """The encoder of a converted model's folder; None: the model takes no images.

    Raises:
        FlowNPUError: the NPU's designs have no place for it; says why.
        MissingDependencyError: onnx_ir is not installed.
    """
    vision = read_genai_config(folder)["model"].get("vision")
    if not vision:
        return None
    path = folder / str(vision.get("filename", "vision.onnx"))
    graph = load_graph(path)
    with reading(path):
        try:
            return encoder_of_graph(graph)
        except ValueError as error:
            raise FlowNPUError(f"{path}: the NPU's designs have no place for its layers: {error}") from error


def encoder_of_graph(graph: Any) -> Encoder:
    """Reads a graph (onnx_ir's) of an encoder.

    Raises:
        ValueError: it is none that the NPU's designs have a place for.
    """
    nodes = list(graph)

    def found(op_type: str) -> list[Any]:
        of_type = [node for node in nodes if node.op_type == op_type]
        if not of_type:
            raise ValueError(f"expected {op_type} in an encoder of images, got none")
        return of_type

    convolution, attention, pooling = found("Conv")[0], found("FlowQKVAttention"), found("AveragePool")[0]
    if any(integer(node, "causal", 1) for node in attention):
        raise ValueError("expected attention that is not causal")
    weight = _constant(convolution, 1)
    hidden, channels, patch_size, _ = weight.shape
    heads, head_size, scale = (
        agreed(name, [read(node) for node in attention]) for name, read in _ATTENTION_ATTRIBUTES.items()
    )
    encoder = Encoder(
        channels,
        patch_size,
        _grid(_after(convolution, "Add"), hidden),
        hidden,
        heads,
        head_size,
        agreed("feed-forward", _activated_sizes(nodes)),
        len(attention),
        int(pooling.attributes["kernel_shape"].as_ints()[0]),
        int(graph.outputs[0].shape[-1]),
        agreed("epsilon", [number(node, "epsilon", 1e-5) for node in found("LayerNormalization")]),
        number(found("SimplifiedLayerNormalization")[0], "epsilon", 1e-5),
        scale or head_size**-0.5,
    )
    return _checked(encoder)


_ATTENTION_ATTRIBUTES: dict[str, Callable[[Any], Any]] = {
    "num_heads": lambda node: integer(node, "num_heads"),
    "head_size": lambda node: integer(node, "head_size"),
    "scale": lambda node: number(node, "scale", 0.0),
}


def _checked(encoder: Encoder) -> Encoder:
    """The encoder, if the designs have a place for it; whatever they refuse themselves is left to them."""
    up, down = encoder.projections[2:]
    if up.padded_columns > bias_column(down.inner):
        raise ValueError(
            f"expected a feed-forward of {_COLUMNS - _PANEL + 1} or more, whose product leaves the column behind it to "
            f"the next bias, got {encoder.feed_forward}"
        )
    if encoder.hidden % 16 or encoder.grid % encoder.pooling:
        raise ValueError(
            f"expected a hidden size in multiples of 16 and a grid in multiples of the pooling's side, got "
            f"{encoder.hidden}, {encoder.grid} and {encoder.pooling}"
        )
    return encoder


def _grid(addition: Any, hidden: int) -> int:
    """Patches of a side, by the positions that are added."""
    positions = next((value for value in addition.inputs if value.const_value is not None), None)
    count = 0 if positions is None else int(np.prod(positions.const_value.shape)) // hidden
    grid = math.isqrt(count)
    if not count or grid**2 != count:
        raise ValueError(f"expected positions of a square of patches after the convolution, got {count}")
    return grid


def _activated_sizes(nodes: list[Any]) -> list[int]:
    """M of each product whose result GELU reads."""
    sizes = []
    for node in nodes:
        if node.op_type == "DenseMatMul" and text(node, "activation", "none") == "gelu_tanh":
            sizes.append(int(_constant(node, 1).shape[0 if integer(node, "transposed", 0) else 1]))
        elif node.op_type == "Gelu" and node.inputs[0].producer() is not None:
            sizes.append(integer(node.inputs[0].producer(), "M"))
    if not sizes:
        raise ValueError("expected products with GELU (tanh) in an encoder of images, got none")
    return sizes


def _after(node: Any, op_type: str) -> Any:
    """The next node of this type on the way from a node's first output."""
    while node is not None and node.op_type != op_type:
        uses = node.outputs[0].uses()
        node = uses[0].node if len(uses) == 1 else None
    if node is None:
        raise ValueError(f"expected {op_type} after the convolution, got none")
    return node


def _constant(node: Any, place: int) -> Any:
    """The initializer at an input."""
    value = node.inputs[place].const_value
    if value is None:
        raise ValueError(f"expected {node.op_type} {node.name} to have an initializer at input {place}")
    return value
