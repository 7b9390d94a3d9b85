# SPDX-License-Identifier: Apache-2.0
"""Writes the nodes that encoders' graphs share: layer norms, products in any `DenseFormat`, unmasked attention.

All values between nodes are float32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from flownpu.convert.dense.weights import DenseWeight, scale_name
from flownpu.convert.graph.writer import GraphWriter
from flownpu.ops.definitions.onnx_function import DOMAIN, VERSION

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import onnx_ir as ir

    from flownpu.convert.dense.weights import DenseFormat, EncoderWeight

GeluKind = Literal["gelu", "gelu_tanh"]
"""GELU: x Phi(x), or its approximation with tanh."""


class EncoderWriter(GraphWriter):
    """Builds a transformer encoder's graph."""

    def __init__(
        self,
        tensors: Mapping[str, ir.TensorProtocol],
        plan: Sequence[EncoderWeight],
        dense_format: DenseFormat,
        norm_epsilon: float,
    ) -> None:
        """Takes the tensors by name, the plan that describes them, how matrices are stored, and the norms' epsilon."""
        super().__init__(tensors)
        self.dense_format = dense_format
        self.norm_epsilon = norm_epsilon
        self.matrices = {weight.name: weight for weight in plan if isinstance(weight, DenseWeight)}

    def _layer_norm(self, x: ir.Value, name: str) -> ir.Value:
        inputs = [x, self._weight(f"{name}.weight"), self._weight(f"{name}.bias")]
        return self._op("LayerNormalization", inputs, name, axis=-1, epsilon=self.norm_epsilon)

    def _attend(
        self, qkv: ir.Value, name: str, heads: int, head_size: int, lengths: Sequence[ir.Value] = ()
    ) -> ir.Value:
        """Attention of all tokens to all tokens, [B, S, H d].

        Args:
            qkv: packed queries, keys and values [B, S, 3 H d].
            name: the module's name.
            heads: H.
            head_size: d.
            lengths: the inputs seqlens_k and total_sequence_length if rows are padded; empty if they are not.
        """
        padded = [None] * 4 + list(lengths) if lengths else []
        output, *present = self.tape.op_multi_out(
            "FlowQKVAttention",
            [qkv, *padded],
            attributes={
                "num_heads": heads,
                "kv_num_heads": heads,
                "head_size": head_size,
                "scale": head_size**-0.5,
                "causal": 0,
            },
            num_outputs=3,
            domain=DOMAIN,
            version=VERSION,
            name=f"/{name}/attention",
        )
        output.name = f"/{name}/attention/output"
        # Nothing uses these outputs, but ONNX Runtime requires all outputs in the call of a function.
        for value, part in zip(present, ("key", "value"), strict=True):
            value.name = f"/{name}/attention/{part}"
        return output

    def _linear(
        self, x: ir.Value, name: str, *, gelu: GeluKind | None = None, residual: ir.Value | None = None
    ) -> ir.Value:
        """The product of x and the transposed weight [M, K] plus bias; then GELU, if given, or plus `residual`."""
        bias = self._weight(f"{name}.bias")
        return self._product(x, f"{name}.weight", bias=bias, gelu=gelu, residual=residual)

    def _product(
        self,
        x: ir.Value,
        weight: str,
        *,
        bias: ir.Value | None = None,
        gelu: GeluKind | None = None,
        residual: ir.Value | None = None,
    ) -> ir.Value:
        name, matrix = weight.removesuffix(".weight"), self.matrices[weight]
        if self.dense_format == "q4nx":
            inputs = [x, self._weight(weight), bias, residual]
            product = self._op("Q4NXMatMul", inputs, name, domain=DOMAIN, M=matrix.rows, K=matrix.columns)
            if gelu is None:
                return product
            return self._op("Gelu", [product], f"{name}/gelu", approximate="none" if gelu == "gelu" else "tanh")
        scale = self._weight(scale_name(weight)) if self.dense_format == "int8" else None
        activation = {} if gelu is None else {"activation": gelu}
        inputs = [x, self._weight(weight), scale, bias, residual]
        return self._op("DenseMatMul", inputs, name, domain=DOMAIN, **activation)
