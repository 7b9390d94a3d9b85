# SPDX-License-Identifier: Apache-2.0
"""Every rule leaves a node with an attribute, input or output that it does not know.

Models are those of the rules' own tests, with one thing added to one of their nodes.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import onnx_ir as ir
import pytest

from flownpu import _native
from flownpu.graph_rewrites import testing
from flownpu.graph_rewrites.plain.attention.scaled_dot_product_attention import fold_attention
from flownpu.graph_rewrites.plain.layer_norm import fold_layer_norm
from flownpu.graph_rewrites.plain.rewriter import rewrite_plain
from flownpu.graph_rewrites.plain.rms_norm import fold_rms_norm
from flownpu.graph_rewrites.plain.rotary_embedding import fold_rotary_embedding
from flownpu.graph_rewrites.plain.weights.embedding import quantise_embeddings
from flownpu.graph_rewrites.plain.weights.parts import part_products
from flownpu.graph_rewrites.plain.weights.projection import quantise_projections
from flownpu.graph_rewrites.report import Report
from flownpu.graph_rewrites.rewriter import rewrite
from flownpu.graph_rewrites.signature import unknown_parts
from flownpu.ops.contracts import input_names
from graph_rewrites.plain import layer_norm_test, rms_norm_test, rotary_embedding_test
from graph_rewrites.plain.attention import scaled_dot_product_attention_test
from graph_rewrites.plain.weights import embedding_test, parts_test, projection_test
from tests.ops.lowering import (
    test_flow_qkv_attention,
    test_gated_projection,
    test_packed_qkv,
    test_projection_bias,
    test_q4nx_dequantized,
    test_q4nx_gather,
    test_q4nx_matmul,
    test_q4nx_moe,
    test_qk_norm,
    test_rules,
    test_split_qkv,
)

Example = tuple[Callable[[], ir.Model], Callable[[ir.Model, list[Any]], int]]


def _of_rule(rule: str) -> Callable[[ir.Model, list[Any]], int]:
    return lambda model, misses: testing.apply(rule, model, misses)


def _of_function(rule: Callable[[ir.Model], Any]) -> Callable[[ir.Model, list[Any]], int]:
    def fold(model: ir.Model, misses: list[Any]) -> int:
        ir.passes.common.ShapeInferencePass(strict_mode=False, data_prop=True)(model)
        count, found, *_ = rule(model)
        misses += found
        ir.passes.common.RemoveUnusedNodesPass()(model)
        return int(count)

    return fold


# More inputs or outputs than any operator has, and the operators whose number of them is not fixed.
MORE = 32
VARIADIC = {("Concat", "input"), ("Split", "output")}

# For each rule, a model from its own tests that it takes, and a function that applies it and counts what it changed.
EXAMPLES: dict[str, Example] = {
    "q4nx_matmul": (lambda: test_q4nx_matmul.Case().model, _of_rule("q4nx_matmul")),
    "q4nx_dequantized": (
        lambda: test_q4nx_dequantized.model(
            test_q4nx_dequantized.Weight("uint4", 33, 128, 32, 0, zero=True), test_q4nx_dequantized.FORMS["matmul"][1]
        ),
        _of_rule("q4nx_dequantized"),
    ),
    "q4nx_gather": (test_q4nx_gather._alone, _of_rule("q4nx_gather")),
    "q4nx_moe": (lambda: test_q4nx_moe.Case().model, _of_rule("q4nx_moe")),
    "flow_qkv_attention": (test_flow_qkv_attention._model, _of_rule("flow_qkv_attention")),
    "qk_norm": (test_qk_norm._model, _of_rule("qk_norm")),
    "split_qkv": (test_split_qkv._model, _of_rule("split_qkv")),
    "packed_qkv": (test_packed_qkv._model, _of_rule("packed_qkv")),
    "projection_bias": (test_projection_bias._model, _of_rule("projection_bias")),
    "gated_projection: geglu": (test_gated_projection._model, _of_rule("gated_projection")),
    "layer_norm": (layer_norm_test._model, _of_function(fold_layer_norm)),
    "rms_norm": (rms_norm_test._model, _of_function(fold_rms_norm)),
    "gelu: Erf": (lambda: testing.parse(test_rules.ERF_GELU.format(**test_rules.BY_ERF)), _of_rule("gelu")),
    "gelu: Tanh": (lambda: testing.parse(test_rules.TANH_GELU.format(**test_rules.BY_TANH)), _of_rule("gelu")),
    "rotary_embedding": (rotary_embedding_test._model, _of_function(lambda model: fold_rotary_embedding(model, 64))),
    "scaled_dot_product_attention": (scaled_dot_product_attention_test._model, _of_function(fold_attention)),
    "part_products": (parts_test._model, _of_function(part_products)),
    "projection": (
        lambda: projection_test._model("p = MatMul (x, stored) y = Add (p, bias)"),
        _of_function(quantise_projections),
    ),
    "embedding": (lambda: embedding_test._model("y = Gather (table, ids)"), _of_function(quantise_embeddings)),
}


def _of_tomorrow(node: ir.Node) -> Iterator[tuple[str, Callable[[ir.Model, ir.Node], None]]]:
    """Additions to a node, each with its change, that a later version of the operator might have."""
    yield "attribute", lambda _, node: node.attributes.add(ir.AttrInt64("of_tomorrow", 1))

    def add_input(model: ir.Model, node: ir.Node) -> None:
        node.resize_inputs(MORE)
        node.replace_input_with(MORE - 1, model.graph.inputs[0])

    def add_output(_: ir.Model, node: ir.Node) -> None:
        node.resize_outputs(MORE)
        node.outputs[-1].name = "of_tomorrow"

    for what, change in (("input", add_input), ("output", add_output)):
        if (node.op_type, what) not in VARIADIC:
            yield what, change


def test_rules_have_examples() -> None:
    tested = {name.partition(":")[0] for name in EXAMPLES}
    assert {*_native.CONVERSION_RULES, "layer_norm"} <= tested


@pytest.mark.parametrize("name", EXAMPLES)
def test_node_with_unknown_part_is_left(name: str) -> None:
    make, apply = EXAMPLES[name]
    model = make()
    nodes = list(model.graph)
    before = [_text(node) for node in nodes]
    assert apply(model, []) == 1
    ir.passes.common.RemoveUnusedNodesPass()(model)
    drawn_in = [
        i
        for i, node in enumerate(nodes)
        if (node.graph is None or _text(node) != before[i]) and node.op_type != "Constant"
    ]
    assert drawn_in
    for i in drawn_in:
        for what, change in _of_tomorrow(list(make().graph)[i]):
            model, misses = make(), []
            node = list(model.graph)[i]
            change(model, node)
            count = apply(model, misses)
            assert node.graph is model.graph, f"{what} of {node.op_type}"
            if name.partition(":")[0] in _native.CONVERSION_RULES:  # they change nodes in place
                # Experts take logits from any node, so also from a Reshape that is not known.
                given = (name, node.op_type) == ("q4nx_moe", "Reshape")
                assert count == int(given), f"{what} of {node.op_type}"
            left = [miss for miss in (*misses, *unknown_parts(model)) if miss.rule == "signature"]
            assert left
            for miss in left:
                assert f"{what} " in miss.reason
                assert "is not known" in miss.reason


def _text(node: ir.Node) -> str:
    return str((node.op_type, [value and value.name for value in node.inputs], dict(node.attributes)))


@pytest.mark.parametrize(
    ("model", "rewrite_all"),
    [(test_q4nx_matmul.Case().model, rewrite), (projection_test._model("y = MatMul (x, stored)"), rewrite_plain)],
)
def test_unknown_attribute_is_reported(model: ir.Model, rewrite_all: Callable[[ir.Model], Report]) -> None:
    (node,) = model.graph
    node.attributes.add(ir.AttrInt64("of_tomorrow", 1))
    assert any("attribute of_tomorrow is not known" in line for line in rewrite_all(model).left())


@pytest.mark.parametrize(
    ("rule", "model"),
    [
        ("qk_norm", test_qk_norm._model()),
        ("split_qkv", test_split_qkv._model()),
        ("packed_qkv", test_packed_qkv._model()),
    ],
)
def test_attention_keeps_all_inputs(rule: str, model: ir.Model) -> None:
    """Inputs that a rule does not need stay in their places, up to the last."""
    count = len(input_names("FlowQKVAttention"))
    node = next(node for node in model.graph if node.op_type == "FlowQKVAttention")
    node.resize_inputs(count)
    for position, name in enumerate(input_names("FlowQKVAttention")):
        if position > 2 and name not in {"q_norm_weight", "k_norm_weight"} and node.inputs[position] is None:
            node.replace_input_with(position, ir.val(name))
    before = list(node.inputs)
    assert testing.apply(rule, model, []) == 1
    (after,) = (node for node in model.graph if node.op_type == "FlowQKVAttention")
    changed = [
        name
        for name, old, new in zip(input_names("FlowQKVAttention"), before, after.inputs, strict=True)
        if new is not old
    ]
    norms = ["q_norm_weight", "k_norm_weight"]
    assert changed == (["query", "key", *norms] if rule == "qk_norm" else ["query", "key", "value"])


@pytest.mark.parametrize("name", _native.CONVERSION_RULES)
def test_nodes_without_inputs_or_outputs_are_left(name: str) -> None:
    """Damaged files have such nodes: a rule must not read inputs or outputs that are not there."""
    make, apply = next(example for key, example in EXAMPLES.items() if key.partition(":")[0] == name)
    for place, node in enumerate(list(make().graph)):
        for count in range(len(node.inputs)):
            model = make()
            list(model.graph)[place].resize_inputs(count)
            with contextlib.suppress(ValueError):  # a rule may report the damage
                apply(model, [])
    model = make()
    model.graph.append(ir.node("Nothing", [], num_outputs=0))
    assert apply(model, []) == 1
