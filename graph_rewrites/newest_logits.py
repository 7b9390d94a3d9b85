# SPDX-License-Identifier: Apache-2.0
"""Adds outputs to a graph with the last token's logits: those of a few newest tokens, and all hidden states."""

from collections.abc import Sequence

import onnx_ir as ir
from onnx_ir import tape

from flownpu.graph_rewrites.last_token_logits import before_caps
from flownpu.graph_rewrites.report import Miss

_RULE = "newest_logits"
NAME = "newest_logits"
"""The name of the output that is added, float32 [B, N, V]."""


def add_newest_logits(model: ir.Model, most: int, output: str = "logits") -> tuple[str, list[Miss]]:
    """Makes the LM head compute the logits of all S new tokens if S <= `most`, to verify candidate tokens.

    GatherND(X, last) W^T [B, 1, V] -> newest = GatherND(X, [last - N + 1 .. last]) W^T [B, N, V],
    logits = newest[:, N - 1],    N = S if S <= most else 1

    A longer call is a prompt: all its logits would take as long as its layers. The output `logits` keeps its shape
    [B, 1, V], since a generator reads from it how many rows there are. Where only the last token goes through layers
    that share keys and values (Gemma 4's E forms), the newest tokens then do.

    Args:
        model: changed in place.
        most: the most new tokens of a call for which all logits are computed.
        output: name of the logits.

    Returns:
        The name of the output with the logits of all new tokens: NAME; or `output`, if the graph computes the logits of
        all tokens already, and is left as it is; or "", with the reason, if the graph cannot be changed.
    """
    logits = next((value for value in model.graph.outputs if value.name == output), None)
    if logits is None:
        return "", [Miss(_RULE, output, "the graph has no such output")]
    if logits.shape is None or logits.shape.rank() != 3:
        return "", [Miss(_RULE, output, f"expected logits [B, 1, V], got {logits.shape}")]
    if logits.shape[1] != 1:
        return output, []
    values = before_caps(logits)
    head = values[-1].producer()
    hidden = None if head is None else head.inputs[0]
    selections = [] if hidden is None else _selections(model, hidden)
    if head is None or not selections:
        return "", [Miss(_RULE, output, "expected a product with what a GatherND selects, the last token's state")]
    is_head_alone = len(selections) == 1
    if (is_head_alone and len(selections[0].outputs[0].uses()) != 1) or logits.uses():
        return "", [Miss(_RULE, output, "expected the last token's state, and the logits, to have no other use")]
    builder = tape.Tape()
    newest = _newest(builder, selections[0].inputs, most)
    for selection in selections:
        selection.replace_input_with(1, newest)
    model.graph.insert_before(selections[0], builder.nodes)
    for value in [*values, *(selection.outputs[0] for selection in selections)]:
        if value.shape is not None and value.shape.rank() == 3:
            value.shape = ir.Shape([value.shape[0], "newest_tokens", value.shape[2]])
    _add_output(model, logits, output)
    return NAME, []


def _selections(model: ir.Model, hidden: ir.Value) -> list[ir.Node]:
    """The nodes that select the last token: the one before the LM head, or those before the layers that share keys."""
    producer = hidden.producer()
    found = [
        node for node in model.graph if node.op_type == "GatherND" and node.attributes.get_int("batch_dims", 0) == 1
    ]
    if producer is not None and producer.op_type == "GatherND":
        return [node for node in found if node is producer]
    return found if len({node.inputs[1] for node in found}) == 1 else []


def add_hidden_states(model: ir.Model, name: str) -> list[Miss]:
    """Makes the hidden states of all new tokens an output, float32 [B, S, D]: what the LM head takes of the last.

    Args:
        model: changed in place.
        name: the new output's name.

    Returns:
        Why it cannot be done; empty if it is.
    """
    logits = next((value for value in model.graph.outputs if value.name == "logits"), None)
    head = None if logits is None else before_caps(logits)[-1].producer()
    hidden = head.inputs[0] if head is not None and head.inputs else None
    if hidden is not None and (selection := hidden.producer()) is not None and selection.op_type == "GatherND":
        hidden = selection.inputs[0]
    if head is None or hidden is None or hidden.producer() is None:
        return [Miss(_RULE, "logits", "expected a product with what layers have computed")]
    hidden.name = name
    hidden.dtype = ir.DataType.FLOAT
    if hidden.shape is None:
        hidden.shape = ir.Shape([None, None, None])
    model.graph.outputs.append(hidden)
    return []


def _newest(builder: tape.Tape, inputs: Sequence[ir.Value | None], most: int) -> ir.Value:
    """Indices [B, N, 1] of each row's newest tokens, from the index of its last token, [B, 1, 1].

    If a row that is padded on the right has fewer than N tokens, the first indices are negative: they count from the
    row's end, and select other tokens, which are of no use.
    """
    hidden, last = inputs[0], inputs[1]

    def integers(values: list[int] | int) -> ir.Value:
        return builder.op("Constant", [], {"value_int" if isinstance(values, int) else "value_ints": values})

    def named(kind: str, operands: Sequence[ir.Value | None], name: str, **attributes: int) -> ir.Value:
        return builder.op(kind, operands, attributes, name=f"/newest_tokens/{name}")

    new = named("Shape", [hidden], "new", start=1, end=2)
    few = named("LessOrEqual", [new, integers([most])], "are_few")
    count = named("Where", [few, new, integers([1])], "count")
    first = named("Squeeze", [named("Sub", [integers([1]), count], "first"), integers([0])], "first_scalar")
    offsets = named("Range", [first, integers(1), integers(1)], "offsets")
    column = named("Unsqueeze", [offsets, integers([1])], "column")
    return named("Add", [last, column], "indices")


def _add_output(model: ir.Model, newest: ir.Value, output: str) -> None:
    """Makes the head's result an output of its own, and a slice with its last row the logits."""
    builder = tape.Tape()
    ends = [builder.op("Constant", [], {"value_ints": [value]}) for value in (-1, 2**62, 1)]
    logits = builder.op("Slice", [newest, *ends], name=f"/{output}/last")
    assert newest.shape is not None
    newest.name, logits.name = NAME, output
    logits.type, logits.shape = newest.type, ir.Shape([newest.shape[0], 1, newest.shape[2]])
    model.graph.extend(builder.nodes)
    outputs = model.graph.outputs
    outputs[list(outputs).index(newest)] = logits
    outputs.append(newest)
