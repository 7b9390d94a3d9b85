# SPDX-License-Identifier: Apache-2.0
"""A mixture of experts that is unrolled, expert by expert -> Q4NXMoE, its weights quantised."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import onnx_ir as ir

from flownpu.graph_rewrites.node import attribute_int, unique_name
from flownpu.graph_rewrites.plain.graph import (
    NoMatchError,
    constant,
    fold_each,
    insert_before,
    integers,
    is_operator,
    made_by,
    other_operand,
    replace,
    scalar,
)
from flownpu.graph_rewrites.plain.weights.float_weight import FloatWeight, float_weight, stacked_initializer
from flownpu.ops.definitions.onnx_function import DOMAIN, VERSION

if TYPE_CHECKING:
    from flownpu.graph_rewrites.report import Miss

# Operators that change a value's shape but not its elements. (Exporters write Slices here that remove nothing.)
_MOVES = ("Reshape", "Squeeze", "Unsqueeze", "Flatten", "Expand", "Slice", "Identity", "Cast")


class _Routing(NamedTuple):
    x: ir.Value
    router: FloatWeight
    chosen: ir.Node
    """TopK."""
    normalized: bool


class _Addition(NamedTuple):
    """A node of the sum over experts, which adds an expert's rows to the sum `before`.

    It is ScatterElements(before, rows, made; reduction="add") or, in opsets without that attribute,
    Add(before, ScatterElements(zeros, rows, made)).
    """

    before: ir.Value
    scatter: ir.Node
    nonzero: ir.Node


class _Expert(NamedTuple):
    number: int
    one_hot: ir.Node
    """The OneHot of the chosen experts, [rows, choices, experts]: 1 for the expert that a row has chosen."""
    x: ir.Value
    routing: ir.Value
    """The weights of each row's chosen experts, [rows, choices]."""
    gate: FloatWeight
    up: FloatWeight
    down: FloatWeight


def fold_mixture(model: ir.Model) -> tuple[int, list[Miss]]:
    """Folds unrolled experts, each of which takes the rows that chose it, and adds its results to the sum's same rows.

    weights, chosen = TopK(Softmax(X . router), k);  weights may be divided by their sum
    for each e:     ranks, rows = NonZero(OneHot(chosen) of e)
                    Y[rows] += weights[rows, ranks] * (SiLU(X[rows] . gate_e) * (X[rows] . up_e)) . down_e
                                                        -> Y = Q4NXMoE(X, router, gates and ups, downs)

    Args:
        model: a plain graph; changed in place.

    Returns:
        How many were folded, and the near misses: sums over rows that a NonZero has found, but of another form.
    """
    return fold_each(model, "mixture", lambda node: _fold(node, model.graph))


def _fold(last: ir.Node, graph: ir.Graph) -> bool:
    """Folds the mixture whose last expert adds its rows at node `last`; returns False for any other node."""
    addition = _addition(last)
    if addition is None or any(_is_after(use.node, last) for use in last.outputs[0].uses()):
        return False
    experts = []
    while addition is not None:
        experts.append(_expert(addition))
        before = addition.before
        addition = None if (node := _producer(before)) is None else _addition(node)
    _check_zeros(before)
    experts.sort(key=lambda expert: expert.number)
    routing = _routing(experts[0])
    count = routing.router.rows
    if [expert.number for expert in experts] != list(range(count)):
        raise NoMatchError(f"expected each of {count} experts once, got {[expert.number for expert in experts]}")
    for expert in experts:
        if (expert.one_hot, expert.x, expert.routing) != (experts[0].one_hot, routing.x, experts[0].routing):
            raise NoMatchError(f"expert {expert.number} has other rows, or other weights of them, than the others")
        if any(_sizes(part) != _sizes(first) for part, first in zip(expert[4:], experts[0][4:], strict=True)):
            raise NoMatchError(f"expert {expert.number} has other sizes than the others")
    _put(last, routing, experts, graph)
    return True


def _put(last: ir.Node, routing: _Routing, experts: list[_Expert], graph: ir.Graph) -> None:
    first, k = experts[0], integers(routing.chosen.inputs[1])
    assert k is not None
    gate_up = [part for expert in experts for part in (expert.gate, expert.up)]
    inputs = [
        routing.x,
        _router_initializer(routing.router, graph),
        stacked_initializer(gate_up, graph),
        stacked_initializer([expert.down for expert in experts], graph),
    ]
    node = ir.node(
        "Q4NXMoE",
        inputs,
        {
            "num_experts": len(experts),
            "experts_per_token": k[0],
            "hidden_size": first.gate.columns,
            "expert_size": first.gate.rows,
            "normalize_routing_weights": int(routing.normalized),
        },
        domain=DOMAIN,
        version=VERSION,
        name=f"{routing.chosen.name or 'TopK'}/experts",
    )
    insert_before(last, [node])
    replace(last.outputs[0], node.outputs[0])


def _router_initializer(router: FloatWeight, graph: ir.Graph) -> ir.Value:
    """The router's weight as an initializer [experts, columns], whichever way it is stored."""
    if not router.transposed:
        return router.value
    stored = constant(router.value)
    assert stored is not None
    name = unique_name(graph, f"{router.value.name}_by_expert")
    tensor = ir.tensor(np.ascontiguousarray(stored.T), name=name)
    shape = ir.Shape(tensor.shape.numpy())
    value = ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=shape, const_value=tensor)
    graph.register_initializer(value)
    return value


# --- The router -------------------------------------------------------------------------------------------------------


def _routing(expert: _Expert) -> _Routing:
    chosen = made_by(_core(expert.one_hot.inputs[0]), "TopK")
    if chosen is None:
        raise NoMatchError("what is made one-hot is not what a TopK has chosen")
    k = integers(chosen.inputs[1])
    if k is None or len(k) != 1 or attribute_int(chosen, "axis", -1) not in (-1, 1):
        raise NoMatchError("TopK does not choose a constant number of experts in the last axis")
    if attribute_int(chosen, "largest", 1) != 1:
        raise NoMatchError("TopK chooses the smallest")
    softmax = made_by(_core(chosen.inputs[0]), "Softmax")
    product = None if softmax is None else made_by(_core(softmax.inputs[0]), "MatMul")
    if softmax is None or product is None or attribute_int(softmax, "axis", -1) not in (-1, 1):
        raise NoMatchError("what TopK chooses from is not the softmax of a product with the router")
    router = float_weight(product.inputs[1], transposed=True)
    x = _core(product.inputs[0])
    if router is None or x is None or x is not expert.x:
        raise NoMatchError("the router is no constant, or its rows are not those that the experts take")
    weights = _core(expert.routing)
    divided = made_by(weights, "Div")
    if divided is not None:
        total = made_by(_core(divided.inputs[1]), "ReduceSum")
        if total is None or _core(divided.inputs[0]) is not _core(total.inputs[0]):
            raise NoMatchError("the experts' weights are divided by something else than their sum")
        weights = _core(divided.inputs[0])
    if weights is not chosen.outputs[0]:
        raise NoMatchError("the experts' weights are not those that TopK has chosen")
    return _Routing(x, router, chosen, divided is not None)


# --- An expert --------------------------------------------------------------------------------------------------------


def _addition(node: ir.Node) -> _Addition | None:
    """A node as an addition of rows that a NonZero has found; None if it is not one."""
    scatters: list[tuple[ir.Node | None, ir.Value | None]] = [(node, None)]
    if is_operator(node, "Add"):
        scatters = [(made_by(value, "ScatterElements"), value) for value in node.inputs]
    for scatter, added in scatters:
        if scatter is None or not is_operator(scatter, "ScatterElements"):
            continue
        nonzero = _nonzero_of(scatter.inputs[1])
        before = scatter.inputs[0] if added is None else other_operand(node, added)
        if nonzero is not None and before is not None and (added is not None) == (_reduction(scatter) == "none"):
            return _Addition(before, scatter, nonzero)
    return None


def _is_after(node: ir.Node, last: ir.Node) -> bool:
    addition = _addition(node)
    return addition is not None and addition.before is last.outputs[0]


def _producer(value: ir.Value | None) -> ir.Node | None:
    core = _core(value)
    return None if core is None else core.producer()


def _reduction(scatter: ir.Node) -> str:
    return scatter.attributes["reduction"].as_string() if "reduction" in scatter.attributes else "none"


def _expert(addition: _Addition) -> _Expert:
    """The expert whose rows an addition adds to the sum; NoMatchError if it has another form."""
    _, scatter, nonzero = addition
    if attribute_int(scatter, "axis", 0) != 0 or _reduction(scatter) not in ("none", "add"):
        raise NoMatchError("a ScatterElements in the sum over experts does not add the rows of one")
    if _reduction(scatter) == "none":
        _check_zeros(scatter.inputs[0])
    number, one_hot = _choice(nonzero)
    product = made_by(_core(scatter.inputs[2]), "Mul")
    for made, weight in () if product is None else (product.inputs, product.inputs[::-1]):
        if (down := made_by(_core(made), "MatMul")) is not None:
            gate, up, rows = _gated(_core(down.inputs[0]))
            routing = _weights(weight, nonzero)
            return _Expert(number, one_hot, _source(rows, nonzero), routing, gate, up, _weight(down))
    raise NoMatchError(f"what expert {number} adds is not a product with its weight, times the rows' weights")


def _choice(nonzero: ir.Node) -> tuple[int, ir.Node]:
    """The number of an expert, and the OneHot of the rows' choices, whose transpose is [experts, choices, rows]."""
    gather = made_by(_core(nonzero.inputs[0]), "Gather")
    number = None if gather is None else scalar(gather.inputs[1])
    mask = None if gather is None or attribute_int(gather, "axis", 0) != 0 else made_by(gather.inputs[0], "Transpose")
    one_hot = None if mask is None else made_by(mask.inputs[0], "OneHot")
    if mask is None or one_hot is None or number is None or tuple(mask.attributes["perm"].as_ints()) != (2, 1, 0):
        raise NoMatchError("NonZero does not look for the rows of one expert")
    if integers(one_hot.inputs[2]) != [0, 1] or attribute_int(one_hot, "axis", -1) != -1:
        raise NoMatchError("the choices of experts are not one-hot in their last axis")
    return int(number), one_hot


def _gated(value: ir.Value | None) -> tuple[FloatWeight, FloatWeight, ir.Value]:
    """Gate, up and x in SiLU(x . gate) * (x . up); NoMatchError if it has another form."""
    product = made_by(value, "Mul")
    for act, up in () if product is None else (product.inputs, product.inputs[::-1]):
        swish, raised = made_by(_core(act), "Mul"), made_by(_core(up), "MatMul")
        if swish is None or raised is None:
            continue
        for gated, sigmoid in (swish.inputs, swish.inputs[::-1]):
            source, gate = made_by(sigmoid, "Sigmoid"), made_by(_core(gated), "MatMul")
            if source is None or gate is None or source.inputs[0] is not gated:
                continue
            x = _core(gate.inputs[0])
            if x is not None and x is _core(raised.inputs[0]):
                return _weight(gate), _weight(raised), x
    raise NoMatchError("an expert is not SiLU(x . gate) * (x . up)")


def _weight(product: ir.Node) -> FloatWeight:
    weight = float_weight(product.inputs[1], transposed=True)
    if weight is None:
        raise NoMatchError("an expert's weight is no constant")
    if (obstacle := weight.obstacle()) is not None:
        raise NoMatchError(obstacle)
    return weight


def _source(rows: ir.Value, nonzero: ir.Node) -> ir.Value:
    """The X from which an expert takes the rows that chose it; NoMatchError if it does not."""
    gather = made_by(rows, "Gather")
    x = None if gather is None else _core(gather.inputs[0])
    if gather is None or x is None or not _is_found(gather.inputs[1], nonzero, 1):
        raise NoMatchError("an expert does not take the rows that chose it")
    return x


def _weights(value: ir.Value | None, nonzero: ir.Node) -> ir.Value:
    """The weights [rows, choices] from which those of the NonZero's rows and choices are taken.

    They are taken from the flattened weights, at row * choices + choice.
    """
    gather = made_by(_core(value), "Gather")
    place = None if gather is None else made_by(_core(gather.inputs[1]), "Add")
    for rank, row in () if place is None else (place.inputs, place.inputs[::-1]):
        scaled = made_by(_core(row), "Mul")
        if gather is None or scaled is None or not _is_found(rank, nonzero, 0):
            continue
        if not any(_is_found(factor, nonzero, 1) for factor in scaled.inputs):
            continue
        weights = gather.inputs[0]
        while (node := made_by(weights, *_MOVES, "Transpose")) is not None:
            if node.op_type == "Transpose" and list(node.attributes["perm"].as_ints()) != [0, 1]:
                break
            weights = node.inputs[0]
        assert weights is not None
        return weights
    raise NoMatchError("what an expert makes of a row is not multiplied by the weight of its choice")


# --- Values -----------------------------------------------------------------------------------------------------------


def _core(value: ir.Value | None) -> ir.Value | None:
    """The value before all operators that only change its shape."""
    while (node := made_by(value, *_MOVES)) is not None:
        value = node.inputs[0]
    return value


def _found(value: ir.Value | None) -> tuple[ir.Node, int] | None:
    """The NonZero that a value comes from, and which row of its result it is: 0 the choices, 1 the rows; or None."""
    core = _core(value)
    split = made_by(core, "Split")
    if split is None or core is None:
        return None
    columns = made_by(split.inputs[0], "Transpose")
    nonzero = None if columns is None else made_by(columns.inputs[0], "NonZero")
    return None if nonzero is None else (nonzero, list(split.outputs).index(core))


def _nonzero_of(value: ir.Value | None) -> ir.Node | None:
    found = _found(value)
    return found[0] if found is not None and found[1] == 1 else None


def _is_found(value: ir.Value | None, nonzero: ir.Node, place: int) -> bool:
    return _found(value) == (nonzero, place)


def _check_zeros(value: ir.Value | None) -> None:
    """Raises NoMatchError unless the sum begins with zeros."""
    core = _core(value)
    filled = made_by(core, "ConstantOfShape")
    given = constant(core)
    if filled is not None and "value" in filled.attributes:
        given = filled.attributes["value"].as_tensor().numpy()
    elif filled is not None:
        given = np.zeros(1)
    if given is None or np.any(given):
        raise NoMatchError("the sum over experts does not begin with zeros")


def _sizes(weight: FloatWeight) -> tuple[int, int]:
    return weight.rows, weight.columns
