# SPDX-License-Identifier: Apache-2.0
"""GroupQueryAttention -> FlowQKVAttention."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir
from onnxscript.rewriter import MatchContext, MatchResult

from flownpu.graph_rewrites.node import attribute_int, attribute_text, last_dimension, optional_input
from flownpu.graph_rewrites.quantized_weight import unique_name
from flownpu.graph_rewrites.rule import Builder, Rule
from flownpu.graph_rewrites.signature import GROUP_QUERY_ATTENTION
from flownpu.ops import flow_qkv_attention
from flownpu.ops.onnx_function import DOMAIN

if TYPE_CHECKING:
    from collections.abc import Sequence


# Attributes that mean the same in both operators.
_SHARED_ATTRIBUTES = (
    "num_heads",
    "kv_num_heads",
    "scale",
    "softcap",
    "local_window_size",
    "causal",
    "do_rotary",
    "rotary_interleaved",
    "qk_norm_epsilon",
    "sliding_window_cache",
)
# Those that may only be there as 0, which changes nothing.
_ZERO_ATTRIBUTES = ("qk_output", "kv_cache_bit_width")
_CACHE_TYPES = ("k_quant_type", "v_quant_type")
_INPUTS = GROUP_QUERY_ATTENTION.inputs or ()


class FlowQKVAttention(Rule):
    """Attention with its KV cache, node for node.

    GroupQueryAttention(query, key, value, past_key, past_value, seqlens_k, total_sequence_length, ...)
        -> FlowQKVAttention(query, key, value, past_key, past_value, seqlens_k, total_sequence_length, ...; head_size)

    Both compute softmax(scale * rope(Q) rope([K_past; K])^T + mask) [V_past; V] with RoPE, window, softcap and cache
    inside. smooth_softmax = 1, which adds e^0 to the denominator, is a head_sink of zeros. The rules qk_norm, split_qkv
    and packed_qkv then draw the nodes before it in.
    """

    def pattern(self, op: Builder, query: Any) -> Any:
        return op.GroupQueryAttention(
            query,
            _domain="com.microsoft",
            _allow_other_inputs=True,
            _outputs=["output", "present_key", "present_value"],
        )

    def examine(self, context: MatchContext, query: ir.Value, **_: object) -> MatchResult:
        node, result = context.root, MatchResult()
        if (obstacle := _obstacle(node)) is not None:
            return result.fail(obstacle, node)
        if query.dtype not in {ir.DataType.FLOAT, None}:
            return result.fail(f"query is {query.dtype}, expected FLOAT; export with float32 activations", node)
        if _head_size(node) is None:
            return result.fail(
                f"head size unknown: the last axis of {query.name} is {last_dimension(query)}, expected a multiple of "
                f"its number of heads",
                node,
            )
        return result

    def rewrite(self, op: Builder, output: ir.Value, **_: object) -> Sequence[ir.Value]:
        node = output.producer()
        assert node is not None
        given = {name: _input(node, name) for name in _INPUTS}
        given["head_sink"] = _head_sink(op, node)
        attributes = {name: node.attributes[name] for name in _SHARED_ATTRIBUTES if name in node.attributes}
        if not attribute_int(node, "do_rotary", 0):
            given["position_ids"] = None  # they are for the rotation
        elif given["position_ids"] is not None:
            attributes["counted_prompt"] = ir.AttrInt64("counted_prompt", 1)
        inputs = [given.get(name) for name in flow_qkv_attention.INPUTS]
        while inputs[-1] is None:
            inputs.pop()
        outputs: Sequence[ir.Value] = op.FlowQKVAttention(
            *inputs,
            **attributes,
            head_size=_head_size(node),
            _domain=DOMAIN,
            _version=1,
            _outputs=3,
            _name=node.name,
        )
        return outputs


def _obstacle(node: ir.Node) -> str | None:
    """What this GroupQueryAttention does that FlowQKVAttention does not, or None."""
    for name in _INPUTS:
        if name not in flow_qkv_attention.INPUTS and _input(node, name) is not None:
            return f"{name} is given: FlowQKVAttention has no such input"
    if len(node.outputs) < 3 or any(value.name == "" for value in node.outputs[:3]):
        return "present_key and present_value are not outputs: FlowQKVAttention appends to a KV cache"
    for name in sorted(node.attributes):
        if name in _CACHE_TYPES:
            if (quantization := attribute_text(node, name, "NONE")) != "NONE":
                return (
                    f"{name}={quantization}: FlowQKVAttention's KV cache is bf16, f16 or f32; export with one of these"
                )
        elif name in _ZERO_ATTRIBUTES and (value := attribute_int(node, name)):
            return f"{name}={value}: FlowQKVAttention has none"
    return None


def _input(node: ir.Node, name: str) -> ir.Value | None:
    return optional_input(node, _INPUTS.index(name))


def _head_sink(op: Builder, node: ir.Node) -> ir.Value | None:
    """What is given, or zeros for smooth_softmax."""
    given = _input(node, "head_sink")
    if given is not None or attribute_int(node, "smooth_softmax", 0) != 1:
        return given
    zeros = np.zeros(attribute_int(node, "num_heads"), np.float32)
    graph = node.graph
    assert isinstance(graph, ir.Graph)
    sink: ir.Value = op.initializer(ir.Tensor(zeros, name=unique_name(graph, f"{node.outputs[0].name}.head_sink")))
    return sink


def _head_size(node: ir.Node) -> int | None:
    """d, from the width of the query, which holds H heads, or H + 2 G when keys and values are packed behind it."""
    query = node.inputs[0]
    assert query is not None
    heads = attribute_int(node, "num_heads")
    if optional_input(node, 1) is None:
        heads += 2 * attribute_int(node, "kv_num_heads")
    width = last_dimension(query)
    return width // heads if width is not None and width % heads == 0 else None
