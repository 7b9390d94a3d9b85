# SPDX-License-Identifier: Apache-2.0
"""ONNX functions written as text: the form in which every operator of FlowNPU is defined.

One operator has several *variants*: with and without a bias, with packed or separate queries, keys and values, and so
on. A function's body cannot ask whether an optional input is there, so each variant is a function of its own. All
variants of an operator share domain and name, and differ in their `overload` (IR version 10), which names the
features that the variant has: "bias_residual". A node says in its own `overload` which of them it means; execution
providers see domain, name, inputs and attributes, the same as ever.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import onnx.parser
import onnx_ir as ir

if TYPE_CHECKING:
    from collections.abc import Sequence

DOMAIN = "ai.flownpu"
VERSION = 1
# `overload` came with IR version 10.
IR_VERSION = 10
# The bodies use no operator that changed between this opset and 26, and none that is newer: Gelu came with 20. A low
# number lets the function into older models too, GenAI's exports among them (21).
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
        overload: The variant; empty for the plain one.
        attributes: Names of required attributes ("M"), and declarations of those with a default ("causal: int = 1").
        inputs: All inputs of the operator, those that this variant does not use included.
        outputs: All outputs of the operator.
        body: Statements, one a line.
    """
    header = f'<domain: "{DOMAIN}", overload: "{overload}", opset_import: {_OPSETS}>'
    signature = f"{name} <{', '.join(attributes)}>" if attributes else name
    text = f"{header} {signature} ({', '.join(inputs)}) => ({', '.join(outputs)}) {{ {body} }}"
    return ir.serde.deserialize_function(onnx.parser.parse_function(text))


def integer(node: ir.Node, name: str) -> int:
    """A required integer attribute of a node.

    Raises:
        ValueError: It is missing, or no integer.
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
        ValueError: It is missing, no integer, or less than 1.
    """
    found = integer(node, name)
    if found < 1:
        raise ValueError(f"[{node.op_type}] expected {name} of at least 1 at node {node.name!r}, got {found}")
    return found


def has_input(node: ir.Node, index: int) -> bool:
    """Whether an optional input is there."""
    return index < len(node.inputs) and node.inputs[index] is not None


def require_inputs(node: ir.Node, names: Sequence[str]) -> None:
    """Checks that the first inputs of a node are there.

    Raises:
        ValueError: One is missing.
    """
    for i, name in enumerate(names):
        if not has_input(node, i):
            raise ValueError(f"[{node.op_type}] expected an input {name} at node {node.name!r}, got none")
