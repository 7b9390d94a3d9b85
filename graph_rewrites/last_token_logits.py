# SPDX-License-Identifier: Apache-2.0
"""Logits of every token -> logits of the last one."""

import onnx_ir as ir
from onnx_ir import tape

from flownpu.graph_rewrites.node import SEQLENS_K, optional_input
from flownpu.graph_rewrites.plain.graph import scalar
from flownpu.graph_rewrites.report import Miss
from flownpu.ops.definitions.onnx_function import DOMAIN

_RULE = "last_token_logits"
# Products that may be the LM head: each row of the output depends only on the same row of the first input.
_HEADS = {(DOMAIN, "Q4NXMatMul"), ("com.microsoft", "MatMulNBits"), ("", "MatMul")}
# Element-wise operators that may follow it: the soft cap c tanh(x / c), where c is a scalar.
_CAPS = {"Div", "Tanh", "Mul"}


def set_logits(model: ir.Model, which: str) -> tuple[int, list[Miss]]:
    """Makes the LM head compute only the last valid token of each sequence, or leaves it to compute all tokens.

    Q4NXMatMul(X, W) [B, S, V] -> Q4NXMatMul(X[b, last_b], W) [B, 1, V],    last_b = min(seqlens_k[b], S - 1)

    (or another product, if the LM head's weight could not become Q4NX)

    A generator reads one row of logits after a prompt; with a vocabulary of 262144, computing the other rows is most of
    the work, and each takes 1 MB in float32. A first prompt is padded on the right, so its last token is at
    seqlens_k[b] (tokens so far less one); later chunks have no padding, and end with their last token.

    Args:
        model: changed in place.
        which: "last" or "all".

    Returns:
        The number of outputs that were changed (0 or 1), and the reason if the logits cannot be what `which` asks for.

    Raises:
        ValueError: `which` is neither "last" nor "all".
    """
    if which not in {"last", "all"}:
        raise ValueError(f"logits={which!r}: expected 'last' or 'all'")
    logits = next((value for value in model.graph.outputs if value.name == "logits"), None)
    if logits is None:
        return 0, [Miss(_RULE, "logits", "the graph has no such output")]
    if logits.shape is not None and logits.shape.rank() == 3 and logits.shape[1] == 1:
        reason = f"logits has shape {logits.shape}: the export computes the last token's only"
        return 0, [] if which == "last" else [Miss(_RULE, "logits", reason)]
    if which == "all":
        return 0, []
    values = before_caps(logits)
    head, seqlens_k = values[-1].producer(), _seqlens_k(model)
    if head is None or (head.domain, head.op_type) not in _HEADS or logits.uses():
        made_by = "an input" if head is None else head.op_type
        reason = f"logits comes from {made_by}, expected the product with the LM head, and no other use"
        return 0, [Miss(_RULE, "logits", reason)]
    if seqlens_k is None:
        return 0, [Miss(_RULE, "logits", "no FlowQKVAttention tells where sequences end (seqlens_k)")]

    hidden = head.inputs[0]
    assert hidden is not None
    builder = tape.Tape()
    selected = _rows(builder, hidden, seqlens_k)
    model.graph.insert_before(head, builder.nodes)
    head.replace_input_with(0, selected)
    for value in values:
        if value.shape is not None and value.shape.rank() == 3:
            value.shape = ir.Shape([value.shape[0], 1, value.shape[2]])
    return 1, []


def before_caps(logits: ir.Value) -> list[ir.Value]:
    """The logits and the values from which their soft cap makes them, the LM head's output last, without other uses."""
    values = [logits]
    while (node := values[-1].producer()) is not None and node.domain == "" and node.op_type in _CAPS:
        value = node.inputs[0]
        if value is None or len(value.uses()) != 1 or any(scalar(operand) is None for operand in node.inputs[1:]):
            break
        values.append(value)
    return values


def _seqlens_k(model: ir.Model) -> ir.Value | None:
    attention = next((node for node in model.graph if node.op_type == "FlowQKVAttention"), None)
    return None if attention is None else optional_input(attention, SEQLENS_K)


def _rows(builder: tape.Tape, hidden: ir.Value, seqlens_k: ir.Value) -> ir.Value:
    """Selects row min(seqlens_k[b], S - 1) for each b: hidden [B, S, D] -> [B, 1, D]."""

    def constant(values: list[int]) -> ir.Value:
        return builder.op("Constant", [], {"value_ints": values})

    # seqlens_k may be [B] or [B, 1]; GatherND's indices are [B, 1, 1]: a tuple of one index for each sequence.
    last = builder.op("Cast", [seqlens_k], {"to": ir.DataType.INT64})
    last = builder.op("Reshape", [last, constant([-1, 1, 1])])
    new_tokens = builder.op("Shape", [hidden], {"start": 1, "end": 2})
    last = builder.op("Min", [last, builder.op("Sub", [new_tokens, constant([1])])])
    row = builder.op("GatherND", [hidden, last], {"batch_dims": 1}, name="last_token")
    row.type = hidden.type
    if hidden.shape is not None:
        row.shape = ir.Shape([hidden.shape[0], 1, hidden.shape[2]])
    return row
