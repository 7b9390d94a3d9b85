# SPDX-License-Identifier: Apache-2.0
"""Which calls of the NPU's designs an encoder of images makes.

For each image, operator by operator (ops/npu/encoder_calls.h has them in order, with their buffers):

    gemm (embedding of patches), add_layer_norm (positions), then in each layer
        gemm (QKV) -> flow_qkv (NCA, packed) -> gemm (output) -> add_layer_norm
        -> gemm (up, GELU) -> gemm (down) -> add_layer_norm
    patch_pooling (and norm), gemm (projector)

Weights are not quantised: there is no dequantisation engine, B is packed once by the host, a bias is a row of it. The
attributes of each call, by which the host finds it, are those that the functions below give it; floats are the bits of
an f32.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from flownpu.aie.artifact_index import ArtifactCall
from flownpu.aie.call_family import Positions
from flownpu.aie.designs.common import bits, limits_of
from flownpu.aie.designs.flow_qkv import FlowQKV
from flownpu.aie.designs.gemm import Gemm
from flownpu.aie.designs.patch_pooling import PatchPooling
from flownpu.aie.designs.vector_operators import ResidualLayerNorm
from flownpu.npu_encoder import Dense, Encoder, padded_tokens

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from flownpu.aie.iron_compat import Program

__all__ = ["EncoderCalls"]

_EPILOGUES = {"none": 0, "gelu": 3}  # values of the attribute `epilogue`; 1 and 2 are a decoder's


@dataclass(frozen=True)
class EncoderCalls:
    """The calls of an encoder.

    Attributes:
        encoder: whose calls.
        target: npu1 or npu2.
    """

    encoder: Encoder
    target: str

    def calls(self) -> Iterator[ArtifactCall]:
        """All of them, each once.

        Raises:
            ValueError: a design has no place for the sizes.
        """
        encoder, rows = self.encoder, padded_tokens(self.encoder.patches)
        qkv, output, up, down = encoder.projections
        found = [
            *(self._gemm(part, rows, part.padded_columns) for part in (encoder.embedding, qkv, output, down)),
            self._gemm(up, rows, down.padded_rows),
            self._gemm(encoder.projector, padded_tokens(encoder.tokens), encoder.projector.padded_columns),
            self._flow_qkv(),
            *(self._add_layer_norm(part, qkv.padded_rows) for part in (encoder.embedding, output, down)),
            self._add_layer_norm(down, encoder.hidden),
            self._patch_pooling(),
        ]
        yield from {(call.array, call.name): call for call in found}.values()

    def _gemm(self, part: Dense, rows: int, c_line: int) -> ArtifactCall:
        epilogue, n = "gelu" if part.gelu else "none", part.padded_columns
        design = Gemm(self.target, epilogue=epilogue)
        if n < design.width:
            design = Gemm(self.target, epilogue=epilogue, n=design.n // 2)
        line = 0 if part.bias else part.inner
        # A's rows are a line each, but for the projector's, whose K ends where the next row begins.
        make = partial(design.program, rows, part.rows, n, line=line, c_line=c_line)
        array = f"gemm-bf16-{epilogue}-{design.m}x{design.n}-{design.e_y}x{design.e_x}"
        attributes = {"rows": rows, "k": part.rows, "n": n, "epilogue": _EPILOGUES[epilogue], "c_line": c_line}
        return _call("gemm", array, f"m{rows}-k{part.rows}-n{n}-{c_line}", attributes, make)

    def _flow_qkv(self) -> ArtifactCall:
        encoder, (qkv, output, *_) = self.encoder, self.encoder.projections
        heads, d, tokens, rows = encoder.heads, encoder.head_size, encoder.patches, padded_tokens(encoder.patches)
        line, o_line = qkv.padded_columns, output.padded_rows
        make = partial(
            FlowQKV(self.target, heads, heads, d).packed_program, tokens, rows, line=line, o_line=o_line,
            scale=encoder.scale,
        )  # fmt: skip
        attributes = {
            "tokens": tokens, "heads": heads, "kv_heads": heads, "head_size": d, "rows": rows, "line": line,
            "o_line": o_line, "causal": 0, "scale": bits(encoder.scale),
        }  # fmt: skip
        return _call("flow_qkv", f"flow_qkv-h{heads}-g{heads}-d{d}", f"tokens{tokens}-nca", attributes, make)

    def _add_layer_norm(self, made_by: Dense, y_line: int) -> ArtifactCall:
        rows, n, x_line, epsilon = (
            self.encoder.patches,
            self.encoder.hidden,
            made_by.padded_columns,
            self.encoder.epsilon,
        )
        make = partial(
            ResidualLayerNorm(self.target, n, self._cores).program, rows, epsilon, x_line=x_line, y_line=y_line
        )
        attributes = {"rows": rows, "n": n, "epsilon": bits(epsilon), "x_line": x_line, "y_line": y_line}
        return _call("add_layer_norm", f"add_layer_norm-n{n}", f"rows{rows}-{x_line}-{y_line}", attributes, make)

    def _patch_pooling(self) -> ArtifactCall:
        encoder = self.encoder
        n, side, grid, epsilon = encoder.hidden, encoder.pooling, encoder.grid, encoder.pooled_epsilon
        design = PatchPooling(self.target, n, side, self._cores, normalised=True)
        attributes = {"grid": grid, "n": n, "side": side, "epsilon": bits(epsilon)}
        make = partial(design.program, grid, epsilon=epsilon)
        return _call("patch_pooling", f"patch_pooling-n{n}-{side}-norm", f"grid{grid}", attributes, make)

    @property
    def _cores(self) -> int:
        """Of the operators on rows: all columns."""
        return limits_of(self.target).columns


def _call(
    operator: str, array: str, name: str, attributes: Mapping[str, int], make: Callable[[], Program]
) -> ArtifactCall:
    """A call that no position changes."""

    def program(_position: int) -> Program:
        return make()

    return ArtifactCall(
        operator, array, name, {key: (value,) for key, value in attributes.items()}, Positions(1), program, moves=False
    )
