# SPDX-License-Identifier: Apache-2.0
"""Finds nodes with an input, an output or an attribute that their operator's contract does not know.

A rule that fuses such a node would lose that part. So the node is left as it is, with the reason.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flownpu import _native
from flownpu.graph_rewrites.report import Miss

if TYPE_CHECKING:
    import onnx_ir as ir


def unknown_parts(model: ir.Model) -> list[Miss]:
    """The nodes that all rules leave because of an unknown part, each with a text about that part."""
    parts = ((node, unknown_part(node)) for node in model.graph)
    return [Miss("signature", node.name or node.op_type, part) for node, part in parts if part]


def unknown_part(node: ir.Node) -> str:
    """The part of a node that its operator's contract (ops/nodes/contract.h) does not know, as a text; "" if none."""
    inputs, outputs = (["" if v is None else str(v.name) for v in side] for side in (node.inputs, node.outputs))
    return _native.unknown_part(node.domain, node.op_type, inputs, outputs, list(node.attributes))
