# SPDX-License-Identifier: Apache-2.0
"""Adds outputs to a graph with the keys and values of the new tokens, for a drafter that reads them (Gemma 4)."""

import onnx_ir as ir
from onnx_ir import tape

from flownpu.graph_rewrites.node import SEQLENS_K, attribute_int, optional_input
from flownpu.graph_rewrites.report import Miss

_RULE = "newest_keys"
_ATTENTION = {"FlowQKVAttention", "GroupQueryAttention"}
PARTS = ("key", "value")


def output_name(kind: int, part: str) -> str:
    """The name of an output; `kind` is 0 of layers with a window, and 1 of those without."""
    return f"newest.{kind}.{part}"


def add_newest_keys(model: ir.Model) -> list[Miss]:
    """Makes the new tokens' keys and values outputs, of the last layer with a window and of the last without.

    present[:, :, T - S : T] -> newest.{0, 1}.{key, value} [B, G, S, d], float32 if the cache is bfloat16, which numpy
    lacks, and else of the cache's type. Layers that read the keys and values of others do not count.

    Args:
        model: changed in place.

    Returns:
        Why it cannot be done; empty if it is.
    """
    outputs = set(model.graph.outputs)
    layers: dict[int, ir.Node] = {}
    for node in model.graph:
        if node.op_type in _ATTENTION and len(node.outputs) > 2 and set(node.outputs[1:3]) <= outputs:
            layers[int(attribute_int(node, "local_window_size", -1) <= 0)] = node
    if not layers:
        return [Miss(_RULE, "present", "expected attention whose keys and values are outputs, and there is none")]
    for kind, node in layers.items():
        query, total = node.inputs[0], optional_input(node, SEQLENS_K + 1)
        if query is None or total is None or attribute_int(node, "sliding_window_cache", 0):
            return [Miss(_RULE, node.name or "", "expected a cache of all tokens, and their number as an input")]
        builder = tape.Tape()
        long = builder.op("Cast", [total], {"to": ir.DataType.INT64.value})
        ends = builder.op("Reshape", [long, builder.op("Constant", [], {"value_ints": [1]})])
        starts = builder.op("Sub", [ends, builder.op("Shape", [query], {"start": 1, "end": 2})])
        axis = builder.op("Constant", [], {"value_ints": [2]})
        for present, part in zip(node.outputs[1:3], PARTS, strict=True):
            rows = builder.op("Slice", [present, starts, ends, axis], name=f"/newest_keys/{kind}.{part}")
            rows.type = present.type
            if present.dtype == ir.DataType.BFLOAT16:
                rows = builder.op("Cast", [rows], {"to": ir.DataType.FLOAT.value})
                rows.dtype = ir.DataType.FLOAT
            rows.name = output_name(kind, part)
            shape = [None] * 4 if present.shape is None else list(present.shape)
            rows.shape = ir.Shape([shape[0], shape[1], None, shape[3]])
            model.graph.outputs.append(rows)
        model.graph.extend(builder.nodes)
    return []
