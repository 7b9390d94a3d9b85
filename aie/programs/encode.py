# SPDX-License-Identifier: Apache-2.0
"""The program of an image: its patches through an encoder's layers, operator by operator.

    gemm (embedding) -> add_layer_norm (positions; host)
    -> [ gemm (QKV) -> flow_qkv (NCA, packed) -> gemm (output) -> add_layer_norm (host)
         -> gemm (up, GELU), gemm (down) -> add_layer_norm (host) ]
    -> patch_pooling (and norm) -> gemm (projector)

Each design is an array of its own, and a change of array costs more than a norm by the host: a layer has two, to
attention and back. One array computes all products (designs/gemm.py).

Weights are not quantised: there is no dequantisation engine, the host packs B once, and a bias is a row of B.

**Buffers**, bf16 but for the residual stream, `rows` = padded_tokens(patches); weights and vectors:
ops/npu/nodes/encoder_shape.h

    patches    [rows][line]          A of the embedding, from the host
    embedded   [rows][padded D]      its product
    residual   [patches][D] f32      the residual stream; host
    x          [rows][line]          the stream, normalised: A of QKV, and of up
    qkv        [rows][padded 3 H d]  products
    context    [rows][line]          attention's output: A of the output product
    attended   [rows][padded D]      its product
    activated  [rows][line]          GELU: A of down
    update     [rows][padded D]      its product
    normal     [patches][D]          the stream after the last layer, normalised
    pooled     [padded tokens][D]    A of the projector; what pads K is the beginning of the next row
    features   [padded tokens][padded features], for the host

Lines have a 1 where a weight has its bias (designs/bias.py); no step writes there.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from flownpu.aie.designs.bias import bias_column
from flownpu.aie.designs.common import ceil_div, limits_of
from flownpu.aie.designs.flow_qkv import FlowQKV
from flownpu.aie.designs.gemm import Gemm
from flownpu.aie.designs.patch_pooling import PatchPooling
from flownpu.aie.programs.call import fixed_call
from flownpu.aie.programs.host import NormOfRows
from flownpu.aie.programs.program import (
    BF16_BYTES,
    Buffer,
    CacheLayout,
    Program,
    ProgramWriter,
    Role,
    View,
    attribute_words,
)

if TYPE_CHECKING:
    from flownpu._native import DenseProjection, EncoderShape
    from flownpu.aie.programs.call import ArtifactCall

# Rows of activations are padded to as many.
_ROWS = 512


def padded_tokens(tokens: int) -> int:
    """Rows of activations in memory for `tokens` tokens."""
    return ceil_div(tokens, _ROWS) * _ROWS


def encode_program(encoder: EncoderShape, target: str) -> Program:
    """The program of one image.

    Raises:
        ValueError: a design does not take the sizes.
    """
    return _Image(encoder, target).program()


@dataclass
class _Image:
    encoder: EncoderShape
    target: str
    where: str = "embedding"
    multiplied: int = 0  # bytes of the weights of the products so far
    normalised: int = 0  # norms so far
    calls: dict[tuple[str, str], ArtifactCall] = field(default_factory=dict)

    def __post_init__(self) -> None:
        encoder, parts = self.encoder, self.encoder.projections
        self.rows = padded_tokens(encoder.patches)
        products = [encoder.embedding, *parts * encoder.layers, encoder.projector]
        self.gemm = Gemm(self.target, epilogue="gelu")
        if min(part.padded_columns for part in products) < self.gemm.width:
            self.gemm = Gemm(self.target, epilogue="gelu", n=self.gemm.n // 2)
        self.vectors = (encoder.patches + 2 * (2 * encoder.layers + 1) + 1) * encoder.hidden
        self.writer = ProgramWriter(
            [
                Buffer("weights", Role.CONSTANT, sum(part.bytes for part in products)),
                Buffer("vectors", Role.CONSTANT, self.vectors * BF16_BYTES),
            ]
        )
        for name, part in zip(
            ("patches", "x", "context", "activated"), (encoder.embedding, *parts[:2], parts[3]), strict=True
        ):
            self.writer.fill(name, part.padded_rows, bias_column(part.inner))

    def program(self) -> Program:
        encoder, (qkv, output, up, down) = self.encoder, self.encoder.projections
        self._multiply(encoder.embedding, "patches", "embedded")
        self._add_layer_norm(encoder.embedding, "embedded", "vectors", "x")
        for layer in range(encoder.layers):
            self.where = f"layer {layer}"
            self._multiply(qkv, "x", "qkv")
            self._flow_qkv()
            self._multiply(output, "context", "attended")
            self._add_layer_norm(output, "attended", "residual", "x")
            self._multiply(up, "x", "activated", line=down.padded_rows)
            self._multiply(down, "activated", "update")
            self._add_layer_norm(down, "update", "residual", "x" if layer + 1 < encoder.layers else "normal")
        self.where = "projector"
        self._pool()
        self._multiply(encoder.projector, "pooled", "features", rows=padded_tokens(encoder.tokens))
        part = encoder.embedding
        given = self.writer.rows("patches", encoder.patches, part.inner, part.padded_rows)
        made = self.writer.rows("features", encoder.tokens, encoder.features, encoder.projector.padded_columns)
        attributes = {key: attribute_words(value) for key, value in encoder.as_dict().items()}
        return Program(
            "encode", attributes, encoder.patches, encoder.patches, 0, CacheLayout(), self.writer.buffers,
            given, made, tuple(self.writer.steps),
        )  # fmt: skip

    def _step(self, operator: str, array: str, name: str, make: partial[Any], *views: View | str) -> None:
        call = self.calls.setdefault((array, name), fixed_call(operator, array, name, make))
        self.writer.step(call, self.where, *views)

    def _multiply(self, part: DenseProjection, source: str, product: str, *, rows: int = 0, line: int = 0) -> None:
        """Product = act(W source + bias); weights follow one another in the order of their products."""
        rows, line, n = rows or self.rows, line or part.padded_columns, part.padded_columns
        gemm, plain = self.gemm, not part.gelu
        # A's rows are a padded line each, except the projector's, whose next row begins right after K.
        a_line = 0 if part.has_bias else part.inner
        make = partial(gemm.program, rows, part.rows, n, plain=plain, line=a_line, c_line=line)
        array = f"gemm-{gemm.weights}-{gemm.epilogue}-{gemm.m}x{gemm.n}-{gemm.e_y}x{gemm.e_x}"
        weights = View("weights", self.multiplied)
        self._step(
            "gemm", array, f"m{rows}-k{part.rows}-n{n}-{line}{'-gelu' * part.gelu}", make, source, weights, product
        )
        self.multiplied += part.bytes

    def _flow_qkv(self) -> None:
        encoder, (qkv, output, *_) = self.encoder, self.encoder.projections
        heads, d, tokens = encoder.heads, encoder.head_size, encoder.patches
        make = partial(
            FlowQKV(self.target, heads, heads, d).packed_program, tokens, self.rows, line=qkv.padded_columns,
            o_line=output.padded_rows, scale=encoder.scale,
        )  # fmt: skip
        array = f"flow_qkv-h{heads}-g{heads}-d{d}"
        self._step("flow_qkv", array, f"tokens{tokens}-nca", make, "qkv", "qkv", "context")

    def _add_layer_norm(self, made_by: DenseProjection, update: str, before: str, normal: str) -> None:
        """Add the update to the stream; normal = norm(the sum), by the next of the norms' weights."""
        rows, n = self.encoder.patches, self.encoder.hidden
        y_line = self.encoder.projections[0].padded_rows if normal == "x" else n
        norm = NormOfRows("add_layer_norm", rows, n, self.encoder.epsilon, x_line=made_by.padded_columns, y_line=y_line)
        weight = View("vectors", (rows + 2 * self.normalised) * n * BF16_BYTES)
        self.normalised += 1
        call = norm.call("bf16" if before == "vectors" else "f32")
        self.writer.step(call, self.where, update, before, weight, "residual", normal)

    def _pool(self) -> None:
        encoder = self.encoder
        n, side, grid = encoder.hidden, encoder.pooling, encoder.grid
        design = PatchPooling(self.target, n, side, limits_of(self.target).columns)
        make = partial(design.program, grid, epsilon=encoder.pooled_epsilon)
        weight = View("vectors", (self.vectors - n) * BF16_BYTES)
        self._step("patch_pooling", f"patch_pooling-n{n}-{side}-norm", f"grid{grid}", make, "normal", weight, "pooled")
