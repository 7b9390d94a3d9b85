# SPDX-License-Identifier: Apache-2.0
"""DenseMatMul: a projection whose weight is stored unquantised or in 8 bits, any number of rows.

    Y = activation(X . (W * scale) + bias) + residual               with transposed = 1: W^T, where W is [M, K]

Encoders' projections become this operator. ONNX Runtime replaces a Cast of a constant by its result, so a graph that
casts bfloat16 weights has them in float32 before any execution provider sees it; this operator keeps the stored type.

Inputs, output and attributes: ops/nodes/dense_matmul.h.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from flownpu.ops.definitions.onnx_function import build, read
from flownpu.ops.definitions.q4nx_matmul import gelu as gelu_tanh

if TYPE_CHECKING:
    import onnx_ir as ir
    from numpy.typing import NDArray

NAME = "DenseMatMul"
# Activations, each with the attributes of the Gelu node that computes it.
ACTIVATIONS = {"none": "", "gelu": '<approximate = "none">', "gelu_tanh": '<approximate = "tanh">'}


def features(node: ir.Node) -> list[str]:
    """The variant of a node: which of "transposed", "scale", "bias", "gelu" or "tanh", and "residual" it has.

    Raises:
        ValueError: The node does not fit the schema.
    """
    inputs, attributes = read(node)
    found = ["transposed"] if attributes["transposed"] else []
    found += [name for name in ("scale", "bias") if inputs[name] is not None]
    found += {"none": [], "gelu": ["gelu"], "gelu_tanh": ["tanh"]}[attributes["activation"]]
    return found + (["residual"] if inputs["residual"] is not None else [])


def function(overload: str) -> ir.Function:
    """The definition of one variant; `overload` is its features, joined by "_"."""
    found = overload.split("_")
    steps = ["weight0 = Cast <to = 1> (W)"]
    weight, product = "weight0", "product"
    if "transposed" in found:
        steps.append(f"weight1 = Transpose <perm = [1, 0]> ({weight})")
        weight = "weight1"
    if "scale" in found:
        steps.append(f"weight2 = Mul ({weight}, scale)")
        weight = "weight2"
    steps.append(f"{product} = MatMul (X, {weight})")
    if "bias" in found:
        steps.append(f"biased = Add ({product}, bias)")
        product = "biased"
    for feature, activation in (("gelu", "gelu"), ("tanh", "gelu_tanh")):
        if feature in found:
            steps.append(f"activated = Gelu {ACTIVATIONS[activation]} ({product})")
            product = "activated"
    steps.append(f"Y = Add ({product}, residual)" if "residual" in found else f"Y = Identity ({product})")
    return build(NAME, overload, "\n".join(steps))


def helpers(overload: str) -> list[ir.Function]:  # noqa: ARG001  (operators' parameter)
    """Functions that the body calls: none."""
    return []


def gelu(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """GELU: x/2 (1 + erf(x / sqrt(2)))."""
    return np.asarray(0.5 * x * (1 + np.vectorize(math.erf, otypes=[np.float64])(x / np.sqrt(2))))


def reference(
    x: NDArray[Any],
    weight: NDArray[Any],
    scale: NDArray[Any] | None = None,
    bias: NDArray[Any] | None = None,
    residual: NDArray[Any] | None = None,
    *,
    activation: str = "none",
    transposed: int = 0,
) -> NDArray[np.float64]:
    """Computes the equation in float64; arguments are the operator's inputs and attributes."""
    w = weight.astype(np.float64)
    if transposed:
        w = w.T
    if scale is not None:
        w = w * scale.astype(np.float64)
    y = x.astype(np.float64) @ w
    if bias is not None:
        y = y + bias.astype(np.float64)
    y = {"none": lambda value: value, "gelu": gelu, "gelu_tanh": gelu_tanh}[activation](y)
    return np.asarray(y if residual is None else y + residual.astype(np.float64))
