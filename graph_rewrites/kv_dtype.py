# SPDX-License-Identifier: Apache-2.0
"""Sets the type of the KV cache at the graph's inputs and outputs."""

import onnx_ir as ir

from flownpu.graph_rewrites.node import PAST_KEY, PAST_VALUE, attribute_int
from flownpu.graph_rewrites.report import Miss
from flownpu.ops.definitions.kv_dtypes import KV_DTYPES, cache_columns
from flownpu.ops.definitions.onnx_function import DOMAIN


def set_kv_dtype(model: ir.Model, dtype: str) -> tuple[int, list[Miss]]:
    """Gives every KV cache of a FlowQKVAttention the type `dtype`.

    past_key, past_value f32 [B, G, P, d] -> `dtype` [B, G, ?, d], int8 [B, G, ?, d + 4]; the same for present.

    The types of the graph's inputs and outputs say how a cache is stored (GenAI allocates accordingly); the computation
    is the same except for the rounding of stored values. The head size becomes known, and the capacity loses its name:
    ONNX Runtime takes dimensions of equal name for equal sizes, but the caller chooses the capacities.

    Args:
        model: changed in place.
        dtype: a key of KV_DTYPES.

    Returns:
        The number of caches whose type was set, and those that could not be.

    Raises:
        ValueError: `dtype` is not one of KV_DTYPES.
    """
    if dtype not in KV_DTYPES:
        raise ValueError(f"KV cache type {dtype!r}: expected one of {', '.join(KV_DTYPES)}")
    count, misses = 0, []
    for node in model.graph:
        if (node.domain, node.op_type) != (DOMAIN, "FlowQKVAttention"):
            continue
        past, present = [node.inputs[i] for i in (PAST_KEY, PAST_VALUE)], list(node.outputs[1:3])
        if (obstacle := _obstacle(past, present)) is not None:
            misses.append(Miss("kv_dtype", node.name or node.op_type, obstacle))
            continue
        columns = cache_columns(KV_DTYPES[dtype], attribute_int(node, "head_size"))
        for value in (*past, *present):
            assert value is not None
            value.type = ir.TensorType(KV_DTYPES[dtype])
            if value.shape is not None:
                value.shape = ir.Shape([*value.shape[:2], None, columns])
        count += 1
    return count, misses


def _obstacle(past: list[ir.Value | None], present: list[ir.Value]) -> str | None:
    for value in past:
        if value is None or not value.is_graph_input() or len(value.uses()) != 1:
            name = "missing" if value is None else value.name
            return f"past ({name}) is not an input of the graph that this attention alone reads"
    for value in present:
        if not value.is_graph_output() or value.uses():
            return f"present ({value.name}) is not an output of the graph that nothing else reads"
    return None
