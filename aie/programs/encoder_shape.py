# SPDX-License-Identifier: Apache-2.0
"""The sizes of an encoder of images (a vision transformer); see EncoderShape in ops/npu/nodes/encoder_shape.h."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from flownpu.aie.designs.bias import bias_column
from flownpu.aie.designs.common import ceil_div
from flownpu.aie.programs.program import BF16_BYTES, attribute_words

__all__ = ["DenseProjection", "EncoderShape", "padded_tokens"]

# As in ops/npu/nodes/encoder_shape.cc: what rows are padded to, the fewest columns of a GEMM, and what K and N of B are
# padded to.
_ROWS, _COLUMNS, _INNER, _PANEL = 512, 256, 256, 32


@dataclass(frozen=True)
class DenseProjection:
    """A product y [columns] = act(W x + b) of x [inner]; see DenseProjection in ops/npu/nodes/encoder_shape.h."""

    inner: int
    columns: int
    bias: bool = True
    gelu: bool = False

    @property
    def rows(self) -> int:
        """K of the call: with a bias, up to the row of the weight that holds the bias."""
        return bias_column(self.inner) + 1 if self.bias else self.inner

    @property
    def padded_rows(self) -> int:
        """Rows of the weight in memory; with a bias, elements of a line of activations."""
        return ceil_div(self.rows, _INNER) * _INNER

    @property
    def padded_columns(self) -> int:
        """N of the call."""
        return max(ceil_div(self.columns, _PANEL) * _PANEL, _COLUMNS)

    @property
    def bytes(self) -> int:
        """Bytes of the weight in memory, padding included."""
        return self.padded_rows * self.padded_columns * BF16_BYTES


@dataclass(frozen=True)
class EncoderShape:
    """What an encoder's calls depend on; see EncoderShape in ops/npu/nodes/encoder_shape.h."""

    channels: int
    patch: int
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
        """Patches of an image."""
        return self.grid**2

    @property
    def tokens(self) -> int:
        """Tokens that an image becomes, after pooling."""
        return (self.grid // self.pooling) ** 2

    @property
    def embedding(self) -> DenseProjection:
        """The product that embeds a patch's values."""
        return DenseProjection(self.channels * self.patch**2, self.hidden)

    @property
    def projections(self) -> tuple[DenseProjection, DenseProjection, DenseProjection, DenseProjection]:
        """QKV, output, up, down."""
        attention = self.heads * self.head_size
        return (
            DenseProjection(self.hidden, 3 * attention),
            DenseProjection(attention, self.hidden),
            DenseProjection(self.hidden, self.feed_forward, gelu=True),
            DenseProjection(self.feed_forward, self.hidden),
        )

    @property
    def projector(self) -> DenseProjection:
        """The product that brings a pooled token to the decoder's hidden size."""
        return DenseProjection(self.hidden, self.features, bias=False)

    @property
    def attributes(self) -> dict[str, tuple[int, ...]]:
        """The attributes of the node EncoderLayers, by which the host tells whether a program is for its model."""
        return {key: attribute_words(value) for key, value in asdict(self).items()}


def padded_tokens(tokens: int) -> int:
    """Rows of activations in memory for `tokens` tokens."""
    return ceil_div(tokens, _ROWS) * _ROWS
