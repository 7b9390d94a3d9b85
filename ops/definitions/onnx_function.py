# SPDX-License-Identifier: Apache-2.0
"""Builds ONNX functions, which define all operators of FlowNPU, from text.

An operator has several *variants*: with or without a bias, with packed or separate queries, keys and values, and so on.
A function's body cannot test whether an optional input is present, so each variant is a separate function.

All variants of an operator share domain and name. Their `overload` (IR version 10) differs, and names the variant's
features, such as "bias_residual". A node's own `overload` selects its variant. Execution providers ignore it: they look
at domain, name, inputs and attributes.
"""

from collections.abc import Sequence
from typing import Any

import onnx.parser
import onnx_ir as ir

from flownpu import _native
from flownpu.ops.contracts import contract_of, defaults

DOMAIN = "ai.flownpu"
VERSION = 1
# The first IR version with `overload`.
IR_VERSION = 10
# The bodies use only operators of this opset that did not change up to opset 26; the newest, Gelu, is of opset 20. A
# low number also admits the functions to older models, such as GenAI's exports (opset 21).
OPSET = 21
_OPSETS = f'["": {OPSET}, "com.microsoft": 1, "{DOMAIN}": {VERSION}]'


# ONNX's names for the types of attributes, in the syntax of functions' signatures and in models.
_KINDS = {
    _native.Kind.INTEGER: ("int", ir.AttributeType.INT, "an integer"),
    _native.Kind.NUMBER: ("float", ir.AttributeType.FLOAT, "a float"),
    _native.Kind.TEXT: ("string", ir.AttributeType.STRING, "a text"),
}


def build(name: str, overload: str, body: str, given: Sequence[str] | None = None) -> ir.Function:
    """The function of one variant of an operator, whose inputs, outputs and attributes are those of its schema.

    Args:
        name: The operator's name.
        overload: The variant's features, joined by "_"; empty for the variant without any.
        body: The statements of the body in ONNX's textual syntax, one on each line.
        given: The outputs that the variant has; None: all. (A call must have all that its function has.)
    """
    contract = contract_of(name)
    inputs, outputs = ([port.name for port in ports] for ports in (contract.inputs, contract.outputs))
    declared = [_declaration(rule) for rule in contract.attributes]
    return build_helper(name, declared, inputs, outputs if given is None else given, body, overload)


def _declaration(rule: _native.AttributeRule) -> str:
    if rule.required:
        return rule.name
    value = f'"{rule.default}"' if isinstance(rule.default, str) else f"{rule.default:g}"
    value += ".0" if isinstance(rule.default, float) and value.isdigit() else ""
    return f"{rule.name}: {_KINDS[rule.kind][0]} = {value}"


def build_helper(
    name: str, attributes: Sequence[str], inputs: Sequence[str], outputs: Sequence[str], body: str, overload: str = ""
) -> ir.Function:
    """A function that others call; `attributes` are names ("M") or declarations of defaults ("causal: int = 1")."""
    header = f'<domain: "{DOMAIN}", overload: "{overload}", opset_import: {_OPSETS}>'
    signature = f"{name} <{', '.join(attributes)}>" if attributes else name
    text = f"{header} {signature} ({', '.join(inputs)}) => ({', '.join(outputs)}) {{ {body} }}"
    return ir.serde.deserialize_function(onnx.parser.parse_function(text))


def read(node: ir.Node) -> tuple[dict[str, ir.Value | None], dict[str, Any]]:
    """The inputs of a node by name, absent ones as None, and its attributes, absent ones with their defaults.

    Raises:
        ValueError: The node does not fit the operator's schema. ONNX would ignore undeclared inputs and attributes.
    """
    contract = contract_of(node.op_type)
    for what, given, ports in (("inputs", node.inputs, contract.inputs), ("outputs", node.outputs, contract.outputs)):
        if len(given) > len(ports):
            declared = ", ".join(port.name for port in ports)
            raise _misfit(node, f"at most {len(ports)} {what} ({declared})", f"{len(given)}")
    known = [rule.name for rule in contract.attributes]
    if unknown := [name for name in node.attributes if name not in known]:
        raise _misfit(node, f"the attributes {', '.join(known)}", ", ".join(unknown))
    values = [*node.inputs, *[None] * (len(contract.inputs) - len(node.inputs))]
    inputs = {port.name: value for port, value in zip(contract.inputs, values, strict=True)}
    for port in contract.inputs:
        if port.presence == _native.Presence.REQUIRED and inputs[port.name] is None:
            raise _misfit(node, f"an input {port.name}", "none")
    attributes = defaults(node.op_type)
    for rule in contract.attributes:
        if rule.required or rule.name in node.attributes:
            attributes[rule.name] = _attribute(node, rule)
    return inputs, attributes


def _attribute(node: ir.Node, rule: _native.AttributeRule) -> Any:
    found = node.attributes.get(rule.name)
    _, kind, article = _KINDS[rule.kind]
    if rule.texts:
        texts = rule.texts.split("|")
        if found is None or found.value not in texts:
            raise _misfit(node, f"{rule.name} to be one of {', '.join(texts)}", repr(found and found.value))
        return found.value
    if found is None or found.type != kind:
        raise _misfit(node, f"{article} attribute {rule.name}", str(found))
    if rule.kind == _native.Kind.INTEGER and (rule.lowest, rule.highest) == (0, 1) and found.value not in (0, 1):
        raise _misfit(node, f"{rule.name} to be 0 or 1", repr(found.value))
    # The device, not the operator, limits the highest value.
    if rule.kind == _native.Kind.INTEGER and found.value < rule.lowest:
        raise _misfit(node, f"{rule.name} of at least {rule.lowest}", repr(found.value))
    return found.value


def _misfit(node: ir.Node, expected: str, got: str) -> ValueError:
    return ValueError(f"[{node.op_type}] expected {expected}, got {got} at node {node.name!r}")
