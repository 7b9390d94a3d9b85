# SPDX-License-Identifier: Apache-2.0
"""What the NPU's designs need to know of a converted model's decoder.

It is read from the graph, as the execution provider reads it (ops/npu/):

- The *layers* are the attention nodes (FlowQKVAttention, FlowKVAttention), in the graph's order. `num_heads`,
  `kv_num_heads`, `head_size` and `scale` (0: 1 / sqrt(head size)) are theirs, and `local_window_size` (-1: none, here
  0). A layer's *table* is the number of its cos_cache and sin_cache among those of all layers, in order of first use.
  It has a QK-norm if q_norm_weight is given.
- Projections are Q4NXMatMul nodes (or FusedDQP, their twin of one row). `hidden` is K of the one that makes an
  attention's first input; `feed_forward` M of the gated ones, rounded up to 64; `activation` their `gating`.
- There are *post-norms* if what reads the product of an attention's output is a SimplifiedLayerNormalization.
- `epsilon` is that of the norms, one for all of them.
- `vocabulary` is M of the product that makes the graph's first output.

All layers must agree on all of it but window and table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flownpu.aie.designs.common import ceil_div
from flownpu.aie.designs.decode_layer_shape import LayerShape
from flownpu.errors import FlowNPUError
from flownpu.model_folder import onnx_path, read_genai_config
from flownpu.npu_graph import agreed, integer, load_graph, number, text
from flownpu.onnx_file import reading

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Decoder", "decoder_of_graph", "read_decoder"]

_DOMAIN = "ai.flownpu"
_ATTENTION, _PRODUCT = {"FlowQKVAttention", "FlowKVAttention"}, {"Q4NXMatMul", "FusedDQP"}
_NORM = "SimplifiedLayerNormalization"
_COS_CACHE, _SIN_CACHE, _Q_NORM, _BLOCKS = 7, 8, 11, 13  # inputs of attention
# The dequantisation engine weaves 64 columns of a gate and of its up projection (designs/dequant_engine.py).
_GATE_COLUMNS = 64


@dataclass(frozen=True)
class Decoder:
    """What a decoder's calls depend on; see the module.

    Attributes:
        shape: of a layer.
        epsilon: of all norms.
        scale: of the scores.
        windows: of each layer; 0: all keys.
        tables: of each layer.
        vocabulary: rows of the LM head.
        positions: the longest context that the model is made for.
    """

    shape: LayerShape
    epsilon: float
    scale: float
    windows: tuple[int, ...]
    tables: tuple[int, ...]
    vocabulary: int
    positions: int

    @property
    def table_count(self) -> int:
        """Rotary tables of the model."""
        return max(self.tables) + 1


def read_decoder(folder: Path) -> Decoder:
    """The decoder of a converted model's folder.

    Raises:
        FlowNPUError: there is none, or the NPU's designs have no place for it; says why.
        MissingDependencyError: onnx_ir is not installed.
    """
    settings = read_genai_config(folder)
    path = onnx_path(folder, settings)
    graph = load_graph(path)
    with reading(path):
        try:
            return decoder_of_graph(graph, settings["model"]["context_length"])
        except ValueError as error:
            raise FlowNPUError(f"{path}: the NPU's designs have no place for its layers: {error}") from error


def decoder_of_graph(graph: Any, positions: int) -> Decoder:
    """Reads a graph (onnx_ir's) of a decoder that is made for so many positions.

    Raises:
        ValueError: the NPU's designs have no place for its layers.
    """
    nodes = list(graph)
    layers = [node for node in nodes if node.domain == _DOMAIN and node.op_type in _ATTENTION]
    gated = [node for node in nodes if _is_product(node) and text(node, "gating", "none") != "none"]
    head = graph.outputs[0].producer()
    if not layers or len(gated) != len(layers) or not _is_product(head):
        raise ValueError(
            f"expected attention and a gated product in each layer, and a product that makes the logits, all of them "
            f"FlowNPU's operators, got {len(layers)} and {len(gated)}, and {head.op_type if head else 'none'}"
        )
    shape = agreed("layers", [_layer_shape(*pair) for pair in zip(layers, gated, strict=True)])
    epsilons = [number(node, "epsilon", 1e-5) for node in nodes if node.op_type.endswith(_NORM)]
    if shape.qk_norm:
        epsilons += [number(node, "qk_norm_epsilon", 1e-6) for node in layers]
    scales = [number(node, "scale", 0.0) or shape.d**-0.5 for node in layers]
    caches = [(node.inputs[_COS_CACHE].name, node.inputs[_SIN_CACHE].name) for node in layers]
    return Decoder(
        shape,
        agreed("epsilon", epsilons),
        agreed("scale", scales),
        tuple(max(0, integer(node, "local_window_size", -1)) for node in layers),
        tuple(list(dict.fromkeys(caches)).index(names) for names in caches),
        integer(head, "M"),
        positions,
    )


def _layer_shape(attention: Any, gated: Any) -> LayerShape:
    """The shape of a layer, of its attention and its gated product."""
    packed, output = attention.inputs[0].producer(), attention.outputs[0].uses()
    if not _is_product(packed) or len(output) != 1 or not _is_product(output[0].node):
        raise ValueError(f"expected a product before {attention.name or 'attention'} and one after it")
    if any(node.inputs[2:] and node.inputs[2] is not None for node in (packed, output[0].node, gated)):
        raise ValueError("expected products without a bias")
    if attention.inputs[1] is not None or not integer(attention, "do_rotary", 0):
        raise ValueError("expected attention over packed query, key and value, with rotary embedding")
    if number(attention, "softcap", 0.0) or not integer(attention, "causal", 1):
        raise ValueError("expected causal attention without softcap")
    if attention.inputs[_BLOCKS:] and attention.inputs[_BLOCKS] is not None:
        raise ValueError("expected attention without bidirectional_blocks: the array's is causal for images, too")
    if integer(attention, "rotary_interleaved", 0):
        raise ValueError("expected rotary embedding of halves, got pairs (rotary_interleaved)")
    after = [use.node.op_type for use in output[0].node.outputs[0].uses()]
    return LayerShape(
        integer(packed, "K"),
        integer(attention, "num_heads"),
        integer(attention, "kv_num_heads", integer(attention, "num_heads")),
        integer(attention, "head_size"),
        ceil_div(integer(gated, "M"), _GATE_COLUMNS) * _GATE_COLUMNS,
        text(gated, "gating", "none"),
        post_norms=_NORM in after,
        qk_norm=len(attention.inputs) > _Q_NORM and attention.inputs[_Q_NORM] is not None,
    )


def _is_product(node: Any) -> bool:
    return node is not None and node.domain == _DOMAIN and node.op_type in _PRODUCT
