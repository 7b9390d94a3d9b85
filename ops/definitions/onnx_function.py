# SPDX-License-Identifier: Apache-2.0
"""Builds ONNX functions from text, the form in which every operator of FlowNPU is defined.

An operator has several *variants*: with and without a bias, with packed or separate queries, keys and values, and so
on. A function's body cannot ask whether an optional input is present, so each variant is a function of its own. All
variants of an operator share domain and name, and differ in their `overload` (IR version 10), which names the features
that the variant has: "bias_residual". A node's own `overload` selects its variant. To execution providers it makes no
difference: they look at domain, name, inputs and attributes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import onnx.parser
import onnx_ir as ir

if TYPE_CHECKING:
    from collections.abc import Sequence

DOMAIN = "ai.flownpu"
VERSION = 1
# The first IR version with `overload`.
IR_VERSION = 10
# The bodies use only operators that exist in this opset (the newest, Gelu, since 20) and did not change up to opset 26.
# A low number allows the functions in older models, too, such as GenAI's exports (opset 21).
OPSET = 21
_OPSETS = f'["": {OPSET}, "com.microsoft": 1, "{DOMAIN}": {VERSION}]'


def build(
    name: str,
    overload: str,
    attributes: Sequence[str],
    inputs: Sequence[str],
    outputs: Sequence[str],
    body: str,
) -> ir.Function:
    """Parses a function in ONNX's textual syntax.

    Args:
        name: The operator's name.
        overload: The variant's features, joined by "_"; empty for the variant without any.
        attributes: Names of required attributes ("M"), and declarations of those with a default ("causal: int = 1").
        inputs: All inputs of the operator, including those that this variant does not use.
        outputs: All outputs of the operator.
        body: The statements of the body, one on each line.
    """
    header = f'<domain: "{DOMAIN}", overload: "{overload}", opset_import: {_OPSETS}>'
    signature = f"{name} <{', '.join(attributes)}>" if attributes else name
    text = f"{header} {signature} ({', '.join(inputs)}) => ({', '.join(outputs)}) {{ {body} }}"
    return ir.serde.deserialize_function(onnx.parser.parse_function(text))


def integer(node: ir.Node, name: str) -> int:
    """A required integer attribute of a node.

    Raises:
        ValueError: The attribute is missing, or no integer.
    """
    attribute = node.attributes.get(name)
    if attribute is None or attribute.type != ir.AttributeType.INT:
        raise ValueError(
            f"[{node.op_type}] expected an integer attribute {name} at node {node.name!r}, got {attribute}"
        )
    return attribute.as_int()


def positive(node: ir.Node, name: str) -> int:
    """A required integer attribute of a node that is at least 1.

    Raises:
        ValueError: The attribute is missing, no integer, or less than 1.
    """
    found = integer(node, name)
    if found < 1:
        raise ValueError(f"[{node.op_type}] expected {name} of at least 1 at node {node.name!r}, got {found}")
    return found


def has_input(node: ir.Node, index: int) -> bool:
    """Whether the optional input at `index` is present."""
    return index < len(node.inputs) and node.inputs[index] is not None


def require_inputs(node: ir.Node, names: Sequence[str]) -> None:
    """Checks that the first inputs of a node, those called `names`, are present.

    Raises:
        ValueError: An input is missing.
    """
    for i, name in enumerate(names):
        if not has_input(node, i):
            raise ValueError(f"[{node.op_type}] expected an input {name} at node {node.name!r}, got none")
