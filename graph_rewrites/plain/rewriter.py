# SPDX-License-Identifier: Apache-2.0
"""Applies all rules for plain graphs, in order."""

from __future__ import annotations

from typing import TYPE_CHECKING

import onnx_ir as ir
from onnx_ir.passes import common as passes
from onnxscript import optimizer

from flownpu.graph_rewrites.native_graph import apply_rules
from flownpu.graph_rewrites.plain.attention.scaled_dot_product_attention import fold_attention
from flownpu.graph_rewrites.plain.known_sizes import MOST_SIZES, fold_known_sizes, take_sizes_from_inputs
from flownpu.graph_rewrites.plain.layer_norm import fold_layer_norm
from flownpu.graph_rewrites.plain.rms_norm import fold_rms_norm
from flownpu.graph_rewrites.plain.rotary_embedding import fold_rotary_embedding
from flownpu.graph_rewrites.plain.weights.embedding import quantise_embeddings
from flownpu.graph_rewrites.plain.weights.mixture import fold_mixture
from flownpu.graph_rewrites.plain.weights.parts import part_products
from flownpu.graph_rewrites.plain.weights.projection import quantise_projections
from flownpu.graph_rewrites.plain.weights.quantised import shown_with_floats
from flownpu.graph_rewrites.report import Report, operators
from flownpu.graph_rewrites.signature import unknown_parts
from flownpu.graph_rewrites.upgrades.opset import raise_opset
from flownpu.ops.definitions import add_functions

if TYPE_CHECKING:
    from flownpu.graph_rewrites.plain.attention.scaled_dot_product_attention import Tiler
    from flownpu.graph_rewrites.report import Miss

# Folding computed sizes needs shapes, and makes more shapes known. Two rounds suffice for exported decoders.
_ROUNDS = 2


def prepare(model: ir.Model) -> None:
    """Converts a plain graph to the operators' ONNX opset, infers shapes, and folds constants.

    Raises:
        ValueError: the graph's opset cannot be converted.
    """
    raise_opset(model)
    _keep_small_integers_in_nodes(model)
    with shown_with_floats(model):
        for _ in range(_ROUNDS):
            _infer_shapes(model)
            fold_known_sizes(model)
            optimizer.fold_constants(model, onnx_shape_inference=False)
        _infer_shapes(model)
    take_sizes_from_inputs(model)
    passes.CommonSubexpressionEliminationPass()(model)
    passes.RemoveUnusedNodesPass()(model)


def _infer_shapes(model: ir.Model) -> None:
    """Infers the shapes of all values but the graph's outputs from those of its inputs."""
    for node in model.graph:
        for value in node.outputs:
            if not value.is_graph_output():
                # Names of dimensions that a converter, or inference with less known, invented would hide the inputs'.
                value.shape = None
    passes.ShapeInferencePass(strict_mode=False, data_prop=True)(model)


def _keep_small_integers_in_nodes(model: ir.Model) -> None:
    """Turns initializers that hold axes and sizes into Constant nodes: shape inference does not read initializers."""
    for value in list(model.graph.initializers.values()):
        tensor = value.const_value
        if tensor is None or tensor.dtype != ir.DataType.INT64 or tensor.size > MOST_SIZES or value.is_graph_input():
            continue
        node = ir.node("Constant", [], {"value": ir.tensor(tensor.numpy())})
        model.graph.insert_before(model.graph[0], node)
        ir.convenience.replace_all_uses_with(value, node.outputs[0])
        del model.graph.initializers[value.name or ""]


def rewrite_plain(model: ir.Model, *, positions: int = 0, tile: Tiler | None = None) -> Report:
    """Turns a plain graph, a decoder with its KV cache or an encoder, into FlowNPU's operators.

    Weights of floats are quantised when the model is saved, one at a time; until then its external data must stay where
    it is. Those of 4 or 8 bits (MatMulNBits, GatherBlockQuantized, DequantizeLinear) keep their codes.
    Inputs and outputs stay what they are.

    Args:
        model: changed in place. It then carries the operators' definitions as model-local functions.
        positions: the longest context in tokens, for which RoPE's tables are made; not used without RoPE.
        tile: returns the folding level of an attention on the target, and the reason, for the report.

    Returns:
        What was rewritten, what was left and why.

    Raises:
        ValueError: the graph's opset cannot be converted, or a node has attributes that it cannot have.
    """
    report = Report(before=operators(model))
    prepare(model)
    report.misses += unknown_parts(model)
    _note(report, "layer_norm", fold_layer_norm(model))
    _note(report, "rms_norm", fold_rms_norm(model))
    apply_rules(model, report, ("gelu",))
    _note(report, "mixture", fold_mixture(model))
    passes.RemoveUnusedNodesPass()(model)  # removes the routers' softmaxes, which are not those of an attention
    _note(report, "part_products", part_products(model))
    _note(report, "rotary_embedding", fold_rotary_embedding(model, positions))
    count, misses, report.attentions = fold_attention(model, tile)
    _note(report, "scaled_dot_product_attention", (count, misses))
    passes.RemoveUnusedNodesPass()(model)
    _note(report, "projection", quantise_projections(model))
    _note(report, "embedding", quantise_embeddings(model))
    passes.RemoveUnusedNodesPass()(model)
    apply_rules(model, report)
    passes.RemoveUnusedNodesPass()(model)
    report.after = operators(model)
    add_functions(model)
    return report


def _note(report: Report, rule: str, outcome: tuple[int, list[Miss]]) -> None:
    report.applied[rule], misses = outcome
    report.misses += misses
