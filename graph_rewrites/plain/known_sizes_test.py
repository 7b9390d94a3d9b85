# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from flownpu.graph_rewrites import testing
from flownpu.graph_rewrites.plain.known_sizes import fold_known_sizes, take_sizes_from_inputs

if TYPE_CHECKING:
    import onnx_ir as ir

CONSTANTS = """
    one = Constant <value = int64 {1}> ()
    two = Constant <value = int64 {2}> ()
    first = Constant <value_ints = [0]> ()
    third = Constant <value_ints = [2]> ()
    last = Constant <value_ints = [-1]> ()
    end = Constant <value_ints = [9223372036854775807]> ()
"""


def _folded(body: str) -> tuple[ir.Model, ir.Model]:
    original = testing.parse(f"sizes (float[B, S, 24] x) => (int64 y) {{ {CONSTANTS} {body} }}")
    original.graph.outputs[0].shape = None
    model, _ = testing.folded(original, lambda graph: (fold_known_sizes(graph), []))
    return original, model


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        ("n = Gather (shape, two)", 24),
        ("m = Gather (shape, two) n = Div (m, two)", 12),
        ("m = Slice (shape, last, end) n = Squeeze (m, first)", 24),
        ("m = Gather (shape, two) k = Cast <to = 7> (m) n = Mul (k, two)", 48),
        ("m = Gather (shape, third) k = Concat <axis = 0> (m, third) j = Reshape (k, last) n = Gather (j, one)", 2),
        ("m = Gather (shape, two) k = Add (m, one) n = Sub (k, two)", 23),
    ],
)
def test_known_sizes_become_constants(size: str, expected: int) -> None:
    # The output itself keeps its node, so that it keeps its name.
    original, model = _folded(f"shape = Shape (x) {size} y = Add (n, n)")
    (add,) = (node for node in model.graph if node.op_type == "Add" and node.outputs[0].name == "y")
    value = add.inputs[0]
    assert value is not None
    assert value.const_value is not None
    assert value.const_value.numpy() == expected
    x = np.zeros((2, 3, 24), np.float32)
    np.testing.assert_array_equal(testing.run(model, {"x": x})[0], testing.run(original, {"x": x})[0])


@pytest.mark.parametrize(
    "body",
    [
        "shape = Shape (x) n = Gather (shape, one) y = Add (n, two)",
        "shape = Shape (x) y = Gather (shape, first)",
        "shape = Shape (x) y = Slice (shape, first, third)",
    ],
)
def test_computation_of_unknown_size_is_kept(body: str) -> None:
    original, model = _folded(body)
    assert testing.operator_names(model) == testing.operator_names(original)


def test_cast_of_data_is_not_taken_for_size() -> None:
    _, model = _folded("c = Cast <to = 7> (x) y = Add (c, two)")
    operators: list[Any] = testing.operator_names(model)
    assert operators == ["Cast", "Add"]


ASKED = "shape = Shape (h) n = Gather (shape, {}) y = Add (n, two)"
INPUTS = "int64[S, B] ids, float[B, S, 24] x"


def _taken(body: str, inputs: str = INPUTS) -> tuple[ir.Model, ir.Model]:
    original = testing.parse(f"sizes ({inputs}) => (int64 y) {{ {CONSTANTS} h = Relu (x) {body} }}")
    original.graph.outputs[0].shape = None
    model, _ = testing.folded(original, lambda graph: (take_sizes_from_inputs(graph), []))
    return original, model


@pytest.mark.parametrize("position", ["one", "first"])
def test_size_is_read_from_graph_input(position: str) -> None:
    original, model = _taken(ASKED.format(position))
    (shape,) = (node for node in model.graph if node.op_type == "Shape")
    assert shape.inputs[0] is model.graph.inputs[0]
    feeds: dict[str, testing.Array] = {"ids": np.zeros((3, 2), np.int64), "x": np.zeros((2, 3, 24), np.float32)}
    found, expected = testing.run(model, feeds)[0], testing.run(original, feeds)[0]
    np.testing.assert_array_equal(found, expected, strict=True)
    assert found.reshape(-1) == {"one": 3, "first": 2}[position] + 2


@pytest.mark.parametrize(
    ("body", "inputs"),
    [
        (ASKED.format("two"), INPUTS),  # the size is a number, which is fold_known_sizes' case
        (ASKED.format("one"), "int64[N] ids, float[?, ?, 24] x"),  # no input has a size of that name
        ("shape = Shape <start = 1> (h) n = Gather (shape, one) y = Add (n, two)", INPUTS),
        ("positions = Concat <axis = 0> (first, third) shape = Shape (h) y = Gather (shape, positions)", INPUTS),
    ],
)
def test_size_that_no_input_has_keeps_its_shape_node(body: str, inputs: str) -> None:
    _, model = _taken(body, inputs)
    (shape,) = (node for node in model.graph if node.op_type == "Shape")
    assert shape.inputs[0] is not None
    assert shape.inputs[0].name == "h"
