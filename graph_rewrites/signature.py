# SPDX-License-Identifier: Apache-2.0
"""What the rules know of the operators they meet: inputs, outputs and attributes.

A rule that draws nodes together loses what it does not know of them. So a node that has more than is written here is
left as it is, with the reason.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import onnx.defs

from flownpu.graph_rewrites.report import Miss
from flownpu.ops.definitions import OPERATORS
from flownpu.ops.onnx_function import DOMAIN, OPSET

if TYPE_CHECKING:
    from collections.abc import Sequence

    import onnx_ir as ir


class Signature(NamedTuple):
    """An operator's inputs and outputs, in order, and its attributes.

    Attributes:
        inputs: names; None: any number of them.
        outputs: the same.
        attributes: names.
    """

    inputs: tuple[str, ...] | None
    outputs: tuple[str, ...] | None
    attributes: frozenset[str]


GROUP_QUERY_ATTENTION = Signature(
    (
        *("query", "key", "value", "past_key", "past_value", "seqlens_k", "total_sequence_length"),
        *("cos_cache", "sin_cache", "position_ids", "attention_bias", "head_sink", "k_scale", "v_scale"),
        *("q_norm_weight", "k_norm_weight", "query_seqlens"),
    ),
    ("output", "present_key", "present_value", "output_qk"),
    frozenset(
        {
            *("causal", "do_rotary", "k_quant_type", "kv_cache_bit_width", "kv_num_heads", "local_window_size"),
            *("num_heads", "qk_norm_epsilon", "qk_output", "rotary_interleaved", "scale", "sliding_window_cache"),
            *("smooth_softmax", "softcap", "v_quant_type"),
        }
    ),
)
# Operators of ONNX Runtime, of which onnx has no schemas; a test holds them against ONNX Runtime's.
_CONTRIBUTED = {
    ("com.microsoft", "MatMulNBits"): Signature(
        ("A", "B", "scales", "zero_points", "g_idx", "bias"),
        ("Y",),
        frozenset({"K", "N", "accuracy_level", "bits", "block_size", "weight_prepacked"}),
    ),
    ("com.microsoft", "GatherBlockQuantized"): Signature(
        ("data", "indices", "scales", "zero_points"),
        ("output",),
        frozenset({"bits", "block_size", "gather_axis", "quantize_axis"}),
    ),
    ("com.microsoft", "GroupQueryAttention"): GROUP_QUERY_ATTENTION,
    ("com.microsoft", "RotaryEmbedding"): Signature(
        ("input", "position_ids", "cos_cache", "sin_cache"),
        ("output",),
        frozenset({"interleaved", "is_packed_batching", "num_heads", "rotary_embedding_dim", "scale"}),
    ),
    ("com.microsoft", "FastGelu"): Signature(("X", "bias"), ("Y",), frozenset()),
    ("", "SimplifiedLayerNormalization"): Signature(
        ("X", "scale"), ("Y", "inv_std_var"), frozenset({"axis", "epsilon", "stash_type"})
    ),
}


@cache
def signature(domain: str, op_type: str) -> Signature | None:
    """What is known of an operator: ONNX's own as opset 21 has them; None of one that no rule is for."""
    if domain == DOMAIN and op_type in OPERATORS:
        operator = OPERATORS[op_type]
        attributes = frozenset(declaration.partition(":")[0] for declaration in operator.ATTRIBUTES)
        return Signature(operator.INPUTS, operator.OUTPUTS, attributes)
    if (domain, op_type) in _CONTRIBUTED or domain != "" or not onnx.defs.has(op_type, OPSET):
        return _CONTRIBUTED.get((domain, op_type))
    schema = onnx.defs.get_schema(op_type, OPSET)
    return Signature(_names(schema.inputs), _names(schema.outputs), frozenset(schema.attributes))


def _names(parameters: Sequence[onnx.defs.OpSchema.FormalParameter]) -> tuple[str, ...] | None:
    variadic = any(parameter.option == onnx.defs.OpSchema.FormalParameterOption.Variadic for parameter in parameters)
    return None if variadic else tuple(parameter.name for parameter in parameters)


def unknown_parts(model: ir.Model) -> list[Miss]:
    """The nodes that every rule leaves for what they have more than is known, and what that is."""
    parts = ((node, unknown_part(node)) for node in model.graph)
    return [Miss("signature", node.name or node.op_type, part) for node, part in parts if part is not None]


def unknown_part(node: ir.Node) -> str | None:
    """What a node has that no rule knows of, in words; None if there is nothing."""
    known = signature(node.domain, node.op_type)
    if known is None:
        return None
    for what, values, names in (("input", node.inputs, known.inputs), ("output", node.outputs, known.outputs)):
        for value in values[len(names) :] if names is not None else ():
            if value is not None and value.name != "":
                return f"{what} {value.name} is not known: {node.op_type} is known with {', '.join(names or ())}"
    for name in node.attributes:
        if name not in known.attributes:
            return f"attribute {name} is not known: {node.op_type} is known with {', '.join(sorted(known.attributes))}"
    return None
