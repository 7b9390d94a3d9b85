# SPDX-License-Identifier: Apache-2.0
"""Q4NXMatMul: a projection with a Q4NX weight, any number of rows.

    Y = X . dequant(W)^T (+ bias) (+ residual)
    Y = act(X . dequant(W_gate)^T) * (X . dequant(W_up)^T) (+ residual)         act = GELU (tanh) or SiLU

Inputs, output and attributes: ops/nodes/q4nx_matmul.h.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from flownpu.ops import q4nx
from flownpu.ops.definitions import q4nx_unpack
from flownpu.ops.definitions.onnx_function import build, read

if TYPE_CHECKING:
    import onnx_ir as ir
    from numpy.typing import NDArray

NAME = "Q4NXMatMul"

_PLAIN = """
    zero = Constant <value_ints = [0]> ()
    codes, scale, minimum = ai.flownpu.Q4NXUnpack{suffix} (W)
    product = ai.flownpu.Q4NXProject{suffix} <M: int = @M, K: int = @K> ({x}, codes, scale, minimum, zero)
"""
_GATED = """
    zero = Constant <value_ints = [0]> ()
    two = Constant <value_ints = [2]> ()
    codes, scale, minimum = ai.flownpu.Q4NXUnpack{suffix} (W)
    padded_rows = Shape <start = 0, end = 1> (codes)
    first_of_up = Div (padded_rows, two)
    gate = ai.flownpu.Q4NXProject{suffix} <M: int = @M, K: int = @K> ({x}, codes, scale, minimum, zero)
    up = ai.flownpu.Q4NXProject{suffix} <M: int = @M, K: int = @K> ({x}, codes, scale, minimum, first_of_up)
    {activation}
    product = Mul (activated, up)
"""
ACTIVATION = {
    "geglu": 'activated = Gelu <approximate = "tanh"> (gate)',
    "swiglu": "sigmoid = Sigmoid (gate)  activated = Mul (gate, sigmoid)",
}


def features(node: ir.Node) -> list[str]:
    """The variant of a node: which of "geglu" or "swiglu", "bias", "residual", "bytes" and "table" it has.

    "bytes" stands for a weight of 8 bits, "table" for one with tables.

    Raises:
        ValueError: The node does not fit the schema, or gating comes with a bias.
    """
    inputs, attributes = read(node)
    gating = attributes["gating"]
    if gating != "none" and inputs["bias"] is not None:
        raise ValueError(f"[{node.op_type}] expected no bias with gating {gating!r}, got one at node {node.name!r}")
    found = [] if gating == "none" else [gating]
    found += [name for name in ("bias", "residual") if inputs[name] is not None]
    return found + [suffix.lower() for suffix in [q4nx_unpack.suffix_of(inputs["W"])] if suffix]


def function(overload: str) -> ir.Function:
    """The definition of one variant; `overload` is its features, joined by "_"."""
    return build(NAME, overload, body(overload, "X", "Y"))


def body(overload: str, x: str, y: str) -> str:
    """The statements that compute the value `y` from the value `x` [rows, K] and the function's other inputs."""
    found = overload.split("_")
    suffix = q4nx_unpack.suffix_in(found)
    activation = next((ACTIVATION[name] for name in found if name in ACTIVATION), None)
    statements = [(_GATED if activation else _PLAIN).format(x=x, activation=activation, suffix=suffix)]
    result = "product"
    for addend in ("bias", "residual"):
        if addend in found:
            statements.append(f"    with_{addend} = Add ({result}, {addend})")
            result = f"with_{addend}"
    return "\n".join([*statements, f"    {y} = Identity ({result})"])


def helpers(overload: str) -> list[ir.Function]:
    """Functions that the variant's body calls."""
    return q4nx_unpack.all_functions(q4nx_unpack.suffix_in(overload.split("_")))


def reference(
    x: NDArray[Any],
    blocks: NDArray[np.uint8],
    bias: NDArray[Any] | None = None,
    residual: NDArray[Any] | None = None,
    *,
    rows: int,
    columns: int,
    gating: str = "none",
) -> NDArray[np.float64]:
    """Computes the equation in float64, from the float32 weights that the blocks stand for."""
    x = x.astype(np.float64)
    if gating == "none":
        y = x @ q4nx.dequantize(blocks, rows, columns).T.astype(np.float64)
    else:
        gate, up = (x @ q4nx.dequantize(part, rows, columns).T.astype(np.float64) for part in np.split(blocks, 2))
        y = {"geglu": gelu, "swiglu": silu}[gating](gate) * up
    for addend in (bias, residual):
        if addend is not None:
            y = y + addend.astype(np.float64)
    return np.asarray(y, np.float64)


def gelu(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """GELU in its tanh approximation: x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))."""
    return np.asarray(0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))))


def silu(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """SiLU: x / (1 + exp(-x)), written so that exp does not overflow."""
    return np.asarray(0.5 * x * (1 + np.tanh(0.5 * x)))
