# SPDX-License-Identifier: Apache-2.0
"""Finds exports to which optimum itself feeds a KV cache of another shape than their graph takes, and the remedy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import onnx_ir as ir

# The families whose head_dim ORTModelForCausalLM reads (optimum-onnx 0.1.0, optimum/onnxruntime/modeling_decoder.py).
# For all others it assumes heads of hidden_size / num_attention_heads.
_READS_HEAD_SIZE = {"gemma", "gemma3_text"}
# The families, among those that optimum exports and FlowNPU knows, for which it assumes as many heads of keys and
# values as of queries, whatever the configuration says (in the same file).
_IGNORES_KEY_VALUE_HEADS = {"gemma2", "olmo2", "phi3"}
_FIRST_KEYS = "past_key_values.0.key"


def unlike_the_graph(config: dict[str, Any], graph: ir.Graph) -> str:
    """A warning for users who load the model with optimum; "" if optimum feeds what the graph takes.

    Args:
        config: the contents of the export's config.json.
        graph: the export's graph; a decoder with a cache has inputs of keys [batch, heads, past, head size].
    """
    shape = next((value.shape for value in graph.inputs if value.name == _FIRST_KEYS), None)
    query_heads, hidden = config.get("num_attention_heads"), config.get("hidden_size")
    if shape is None or len(shape) != 4 or not isinstance(query_heads, int) or not isinstance(hidden, int):
        return ""
    family = config.get("model_type")
    fed = {
        "num_key_value_heads": query_heads if family in _IGNORES_KEY_VALUE_HEADS else shape[1],
        "embed_size_per_head": shape[3] if family in _READS_HEAD_SIZE else hidden // max(query_heads, 1),
    }
    taken = {"num_key_value_heads": shape[1], "embed_size_per_head": shape[3]}
    mends = [f"model.{name} = {size}" for name, size in taken.items() if isinstance(size, int) and size != fed[name]]
    if not mends:
        return ""
    return (
        f"optimum-onnx 0.1.0's ORTModelForCausalLM feeds {fed['num_key_value_heads']} heads of "
        f"{fed['embed_size_per_head']} where this graph takes {shape[1]} of {shape[3]}; set after loading: "
        + "; ".join(mends)
    )
