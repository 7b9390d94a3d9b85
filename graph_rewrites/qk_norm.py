# SPDX-License-Identifier: Apache-2.0
"""The RMS norm over each head of Q and K -> inside FlowQKVAttention."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from onnxscript.rewriter import MatchContext, MatchResult

from flownpu.graph_rewrites.node import (
    K_NORM_WEIGHT,
    Q_NORM_WEIGHT,
    attention,
    attention_inputs,
    attribute_float,
    attribute_int,
    constant_integers,
    last_dimension,
)
from flownpu.graph_rewrites.rule import Builder, Rule
from flownpu.ops.onnx_function import DOMAIN

if TYPE_CHECKING:
    from collections.abc import Sequence

    import onnx_ir as ir

# SimplifiedLayerNormalization's.
_DEFAULT_EPSILON = 1e-5


class QKNorm(Rule):
    """QK-norm, a root mean square norm over the d numbers of each head, moves into the attention.

    FlowQKVAttention(Reshape(SimplifiedLayerNormalization(Reshape(query, [.., d]), wq), [.., H*d]),
                     Reshape(SimplifiedLayerNormalization(Reshape(key,   [.., d]), wk), [.., G*d]), value, ...)
        -> FlowQKVAttention(query, key, value, ..., q_norm_weight=wq, k_norm_weight=wk; qk_norm_epsilon)
    """

    def pattern(
        self,
        op: Builder,
        query: Any,
        key: Any,
        q_weight: Any,
        k_weight: Any,
        q_apart: Any,
        q_joined: Any,
        k_apart: Any,
        k_joined: Any,
    ) -> Any:
        q = op.SimplifiedLayerNormalization(op.Reshape(query, q_apart), q_weight, _outputs=["q_norm"])
        k = op.SimplifiedLayerNormalization(op.Reshape(key, k_apart), k_weight, _outputs=["k_norm"])
        return op.FlowQKVAttention(
            op.Reshape(q, q_joined),
            op.Reshape(k, k_joined),
            _domain=DOMAIN,
            _allow_other_inputs=True,
            _outputs=["output", "present_key", "present_value"],
        )

    def examine(  # noqa: PLR0911 # each is a reason
        self, context: MatchContext, q_norm: ir.Value, k_norm: ir.Value, **values: ir.Value
    ) -> MatchResult:
        node, result = context.root, MatchResult()
        if any(attention_inputs(node)[i] is not None for i in (Q_NORM_WEIGHT, K_NORM_WEIGHT)):
            return result.fail("the attention has norms of Q and K already", node)
        head_size = attribute_int(node, "head_size")
        for side, heads in (("q", attribute_int(node, "num_heads")), ("k", attribute_int(node, "kv_num_heads"))):
            apart, joined = (constant_integers(values[f"{side}_{shape}"]) for shape in ("apart", "joined"))
            if not _is_norm_over_heads(apart, joined, heads, head_size):
                return result.fail(
                    f"{side} is reshaped to {apart}, normed, and reshaped to {joined}: expected a norm over each of "
                    f"{heads} heads of {head_size}",
                    node,
                )
            if last_dimension(values[f"{side}_weight"]) != head_size:
                return result.fail(f"{side}'s norm weight is not one of {head_size} numbers", node)
        epsilons = [_epsilon(norm) for norm in (q_norm, k_norm)]
        if epsilons[0] != epsilons[1]:
            return result.fail(f"the norms of Q and K differ in epsilon: {epsilons[0]:g} and {epsilons[1]:g}", node)
        if any(attribute_int(reshape, "allowzero", 0) for reshape in context.nodes if reshape.op_type == "Reshape"):
            return result.fail("a Reshape has allowzero = 1: its zeros do not stand for the input's sizes", node)
        axes = [_axis(norm) for norm in (q_norm, k_norm)]
        if axes != [-1, -1]:
            return result.fail(f"the norms' axes are {axes}, expected the last one", node)
        return result

    def rewrite(
        self,
        op: Builder,
        query: ir.Value,
        key: ir.Value,
        q_weight: ir.Value,
        k_weight: ir.Value,
        q_norm: ir.Value,
        output: ir.Value,
        **_: object,
    ) -> Sequence[ir.Value]:
        node = output.producer()
        assert node is not None
        inputs = attention_inputs(node)
        inputs[:2] = query, key
        inputs[Q_NORM_WEIGHT], inputs[K_NORM_WEIGHT] = q_weight, k_weight
        return attention(op, node, inputs, qk_norm_epsilon=_epsilon(q_norm))


def _is_norm_over_heads(apart: list[int] | None, joined: list[int] | None, heads: int, head_size: int) -> bool:
    """Whether two Reshapes cut [B, S, heads*d] into heads and restore it: as [B, S*heads, d] or [B, S, heads, d]."""
    width = heads * head_size
    if apart == [0, -1, head_size]:
        return joined == [0, -1, width]
    return apart in ([0, 0, -1, head_size], [0, 0, heads, head_size]) and joined in ([0, 0, -1], [0, 0, width])


def _epsilon(norm: ir.Value) -> float:
    node = norm.producer()
    assert node is not None
    return attribute_float(node, "epsilon", _DEFAULT_EPSILON)


def _axis(norm: ir.Value) -> int:
    node = norm.producer()
    assert node is not None
    return attribute_int(node, "axis", -1)
