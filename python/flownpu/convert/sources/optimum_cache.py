# SPDX-License-Identifier: Apache-2.0
"""Which KV cache optimum feeds an export of its own, and what to set where that is another than the graph takes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import onnx_ir as ir

__all__ = ["unlike_the_graph"]

# The families whose head_dim ORTModelForCausalLM reads (optimum-onnx 0.1.0, optimum/onnxruntime/modeling_decoder.py);
# to all others it feeds heads of hidden_size / num_attention_heads.
_READS_HEAD_SIZE = {"gemma", "gemma3_text"}
# Those to which it feeds as many heads of keys and values as there are of queries (same place; those of ours that it
# exports), though their configurations say how many there are.
_IGNORES_KEY_VALUE_HEADS = {"gemma2", "olmo2", "phi3"}
_FIRST_KEYS = "past_key_values.0.key"


def unlike_the_graph(config: dict[str, Any], graph: ir.Graph) -> str:
    """The sentence for who loads the model with optimum; empty: what it feeds is what the graph takes.

    Args:
        config: the export's config.json.
        graph: with keys [batch, heads, past, head size] among its inputs, if it is a decoder with a cache.
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
