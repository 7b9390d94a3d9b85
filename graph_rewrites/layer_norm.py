# SPDX-License-Identifier: Apache-2.0
"""A layer norm in its parts -> LayerNormalization."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from onnxscript.rewriter import MatchContext, MatchResult

from flownpu.graph_rewrites.node import is_constant, last_dimension
from flownpu.graph_rewrites.plain_graph import integers, scalar
from flownpu.graph_rewrites.rule import Builder, Rule

if TYPE_CHECKING:
    import onnx_ir as ir


class LayerNorm(Rule):
    """The norm over the last axis, as opsets before 17 have it.

    D = X - ReduceMean(X);  D / Sqrt(ReduceMean(Pow(D, 2)) + epsilon) * weight + bias
        -> LayerNormalization(X, weight, bias; axis=-1, epsilon)
    """

    def pattern(
        self, op: Builder, x: Any, two: Any, axes: Any, square_axes: Any, epsilon: Any, weight: Any, bias: Any
    ) -> Any:
        centred = op.Sub(x, op.ReduceMean(x, axes, _allow_other_attributes=True, _outputs=["mean"]))
        variance = op.ReduceMean(op.Pow(centred, two), square_axes, _allow_other_attributes=True, _outputs=["variance"])
        return op.Add(op.Mul(op.Div(centred, op.Sqrt(op.Add(variance, epsilon))), weight), bias)

    def examine(  # noqa: PLR0911 # each is a reason
        self,
        context: MatchContext,
        x: ir.Value,
        two: ir.Value,
        axes: ir.Value,
        square_axes: ir.Value,
        epsilon: ir.Value,
        weight: ir.Value,
        bias: ir.Value,
        mean: ir.Value,
        variance: ir.Value,
    ) -> MatchResult:
        node, result = context.root, MatchResult()
        if (power := scalar(two)) != 2:
            return result.fail(f"the variance is of X to the power {power}, expected 2", node)
        rank = None if x.shape is None else x.shape.rank()
        for name, value in (("mean", axes), ("variance", square_axes)):
            if (axis := integers(value)) not in ([-1], [rank and rank - 1]):
                return result.fail(f"the {name} is over the axes {axis}, expected the last one", node)
        for name, value in (("mean", mean), ("variance", variance)):
            reduce = value.producer()
            if reduce is not None and "keepdims" in reduce.attributes and not reduce.attributes["keepdims"].as_int():
                return result.fail(f"the {name} drops its axis (keepdims = 0), so that it belongs to another one", node)
        if scalar(epsilon) is None:
            return result.fail("epsilon is not a constant number", node)
        size = last_dimension(x)
        for name, value in (("weight", weight), ("bias", bias)):
            if not is_constant(value) or value.shape is None or value.shape.rank() != 1:
                return result.fail(f"the {name} is not a constant vector", node)
            if size not in {None, last_dimension(value)}:
                return result.fail(
                    f"the {name} has {last_dimension(value)} numbers, and X {size} in its last axis", node
                )
        return result

    def rewrite(
        self, op: Builder, x: ir.Value, epsilon: ir.Value, weight: ir.Value, bias: ir.Value, **_: object
    ) -> ir.Value:
        value: ir.Value = op.LayerNormalization(
            x, weight, bias, axis=-1, epsilon=scalar(epsilon), _name=f"{weight.name}/norm"
        )
        return value
