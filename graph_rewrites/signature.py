# SPDX-License-Identifier: Apache-2.0
"""What the rules know of the operators they meet: inputs, outputs and attributes.

A rule that draws nodes together loses what it does not know of them. So a node that has more than is written here is
left as it is, with the reason.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import onnx.defs

from flownpu import _native
from flownpu.graph_rewrites.report import Miss
from flownpu.ops.definitions.onnx_function import OPSET

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


@cache
def signature(domain: str, op_type: str) -> Signature | None:
    """What is known of an operator: of ONNX's own what opset 21 has, of others their contract (ops/contract.h).

    None of one that no rule is for.
    """
    if domain == "" and onnx.defs.has(op_type, OPSET):
        schema = onnx.defs.get_schema(op_type, OPSET)
        return Signature(_names(schema.inputs), _names(schema.outputs), frozenset(schema.attributes))
    for contract in _native.contracts():
        if (contract.domain, contract.op_type) == (domain, op_type):
            inputs, outputs = (tuple(port.name for port in ports) for ports in (contract.inputs, contract.outputs))
            return Signature(inputs, outputs, frozenset(rule.name for rule in contract.attributes))
    return None


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
