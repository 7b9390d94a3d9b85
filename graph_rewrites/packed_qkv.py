# SPDX-License-Identifier: Apache-2.0
"""Three projections of one input for the attention -> one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir
from onnxscript.rewriter import MatchContext, MatchResult

from flownpu.graph_rewrites.node import (
    BIAS,
    attention,
    attention_inputs,
    attribute_int,
    is_constant,
    optional_input,
    projection_obstacle,
    with_last_dimension,
)
from flownpu.graph_rewrites.quantized_weight import concatenated_initializer, unique_name
from flownpu.graph_rewrites.rule import Builder, Rule
from flownpu.ops import q4nx
from flownpu.ops.onnx_function import DOMAIN

if TYPE_CHECKING:
    from collections.abc import Sequence


class PackedQKV(Rule):
    """One product reads the activations once and writes Q, K and V side by side.

    FlowQKVAttention(Q4NXMatMul(X, Wq[, bq]), Q4NXMatMul(X, Wk[, bk]), Q4NXMatMul(X, Wv[, bv]), ...)
        -> FlowQKVAttention(Q4NXMatMul(X, [Wq; Wk; Wv][, [bq; bk; bv]]), None, None, ...)

    The weights are stacked by whole blocks of 32 rows: rows of Wq and Wk must fill theirs.
    """

    def pattern(self, op: Builder, x: Any) -> Any:
        query, key, value = (
            op.Q4NXMatMul(x, _domain=DOMAIN, _allow_other_inputs=True, _outputs=[name])
            for name in ("query", "key", "value")
        )
        return op.FlowQKVAttention(
            query,
            key,
            value,
            _domain=DOMAIN,
            _allow_other_inputs=True,
            _outputs=["output", "present_key", "present_value"],
        )

    def examine(
        self, context: MatchContext, query: ir.Value, key: ir.Value, value: ir.Value, **_: object
    ) -> MatchResult:
        result = MatchResult()
        projections = _producers(query, key, value)
        biases = [optional_input(projection, BIAS) for projection in projections]
        biased = all(is_constant(bias) for bias in biases)
        for projection in projections:
            if (obstacle := projection_obstacle(projection, bias=biased)) is not None:
                return result.fail(obstacle, projection)
        rows = [attribute_int(projection, "M") for projection in projections]
        if any(count % q4nx.BLOCK_ROWS for count in rows[:2]):
            return result.fail(
                f"Q and K have {rows[0]} and {rows[1]} rows, expected multiples of {q4nx.BLOCK_ROWS}", context.root
            )
        return result

    def rewrite(
        self,
        op: Builder,
        x: ir.Value,
        query: ir.Value,
        key: ir.Value,
        value: ir.Value,
        output: ir.Value,
        **_: object,
    ) -> Sequence[ir.Value]:
        node = output.producer()
        assert node is not None
        projections = _producers(query, key, value)
        rows = sum(attribute_int(projection, "M") for projection in projections)
        weights = [weight for projection in projections if (weight := projection.inputs[1]) is not None]
        columns = attribute_int(projections[0], "K")
        packed = op.Q4NXMatMul(
            x,
            concatenated_initializer(op, weights, columns, "qkv_proj.weight_Q4NX"),
            *_bias(op, projections),
            M=rows,
            K=columns,
            _domain=DOMAIN,
            _version=1,
        )
        with_last_dimension(query, packed, rows)
        return attention(op, node, [packed, None, None, *attention_inputs(node)[3:]])


def _bias(op: Builder, projections: Sequence[ir.Node]) -> list[ir.Value]:
    """The initializer of the projections' biases one after the other, if they have any."""
    biases = [optional_input(projection, BIAS) for projection in projections]
    arrays = [bias.const_value.numpy() for bias in biases if bias is not None and bias.const_value is not None]
    graph = projections[0].graph
    if not arrays or biases[0] is None:
        return []
    assert isinstance(graph, ir.Graph)
    name = unique_name(graph, f"{(biases[0].name or 'bias')}_QKV")
    return [op.initializer(ir.tensor(np.concatenate(arrays), name=name))]


def _producers(*values: ir.Value) -> list[ir.Node]:
    nodes = [value.producer() for value in values]
    return [node for node in nodes if node is not None]
