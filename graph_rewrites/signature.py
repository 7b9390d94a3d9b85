# SPDX-License-Identifier: Apache-2.0
"""What a node has that the rules do not know: an input, an output or an attribute.

A rule that draws nodes together would lose it. So such a node is left as it is, with the reason.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flownpu import _native
from flownpu.graph_rewrites.report import Miss

if TYPE_CHECKING:
    import onnx_ir as ir


def unknown_parts(model: ir.Model) -> list[Miss]:
    """The nodes that every rule leaves for what they have more than is known, and what that is."""
    parts = ((node, unknown_part(node)) for node in model.graph)
    return [Miss("signature", node.name or node.op_type, part) for node, part in parts if part]


def unknown_part(node: ir.Node) -> str:
    """What a node has that its operator's contract (ops/nodes/contract.h) does not know, in words; empty if nothing."""
    inputs, outputs = (["" if v is None else str(v.name) for v in side] for side in (node.inputs, node.outputs))
    return _native.unknown_part(node.domain, node.op_type, inputs, outputs, list(node.attributes))
