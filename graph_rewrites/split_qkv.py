# SPDX-License-Identifier: Apache-2.0
"""A packed projection that is split for the attention -> given to it packed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from onnxscript.rewriter import MatchContext, MatchResult

from flownpu.graph_rewrites.node import (
    attention,
    attention_inputs,
    attribute_int,
    constant_integers,
    optional_input,
)
from flownpu.graph_rewrites.rule import Builder, Rule
from flownpu.ops.onnx_function import DOMAIN

if TYPE_CHECKING:
    from collections.abc import Sequence

    import onnx_ir as ir


class SplitQKV(Rule):
    """The attention reads Q, K and V where they are.

    FlowQKVAttention(*Split(packed, [H*d, G*d, G*d]; axis=-1), ...) -> FlowQKVAttention(packed, None, None, ...)
    """

    def pattern(self, op: Builder, packed: Any) -> Any:
        query, key, value = op.Split(packed, _allow_other_inputs=True, _outputs=["query", "key", "value"])
        return op.FlowQKVAttention(
            query,
            key,
            value,
            _domain=DOMAIN,
            _allow_other_inputs=True,
            _outputs=["output", "present_key", "present_value"],
        )

    def examine(self, context: MatchContext, query: ir.Value, **_: object) -> MatchResult:
        node, split, result = context.root, query.producer(), MatchResult()
        assert split is not None
        head_size = attribute_int(node, "head_size")
        heads = [attribute_int(node, name) for name in ("num_heads", "kv_num_heads", "kv_num_heads")]
        expected = [count * head_size for count in heads]
        sizes = constant_integers(optional_input(split, 1))
        if sizes != expected:
            return result.fail(f"Split into {sizes}, expected {expected}: Q, K and V of the attention's heads", split)
        if (axis := attribute_int(split, "axis", 0)) not in {-1, 2}:
            return result.fail(f"Split along axis {axis}, expected the last one", split)
        return result

    def rewrite(self, op: Builder, packed: ir.Value, output: ir.Value, **_: object) -> Sequence[ir.Value]:
        node = output.producer()
        assert node is not None
        return attention(op, node, [packed, None, None, *attention_inputs(node)[3:]])
