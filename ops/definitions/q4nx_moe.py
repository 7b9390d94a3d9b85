# SPDX-License-Identifier: Apache-2.0
"""Q4NXMoE: a mixture of experts. Each is a gated feed-forward with Q4NX weights; a router chooses some for each row.

    logits = X . router^T + logits_bias, or router_logits
    T      = the k experts with the largest logits; among equal ones, those with the lower numbers
    p_e    = softmax over T of logits[e],               with normalize_routing_weights = 1
             softmax over all experts of logits[e],     otherwise
    with router_bias: T = the k experts with the largest sigmoid(logits) + router_bias,
    p_e = sigmoid(logits[e]), divided by the sum of them over T
    Y      = sum over e in T of p_e expert_scales_e ((act(g) * u) . down_e^T + down_bias_e)   act = GELU (tanh) or SiLU
    with g = X . gate_e^T and u = X . up_e^T, each plus its part of gate_up_bias_e; and of swiglu, with its attributes
    act(g) * u = g' sigmoid(swiglu_alpha g') (u' + swiglu_beta),
    g' = min(g, swiglu_limit), u' = max(-swiglu_limit, min(u, swiglu_limit))

(Shazeer et al., "Outrageously Large Neural Networks: The Sparsely-Gated Mixture-of-Experts Layer", 2017. A softmax over
all experts whose chosen weights are then divided by their sum is the same as the softmax over the chosen ones. The bias
is that of Wang et al., "Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts", 2024, equation 3; the
limited SwiGLU that of OpenAI, "gpt-oss-120b & gpt-oss-20b Model Card", 2025.)

Inputs, output and attributes: ops/nodes/q4nx_moe.h.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from flownpu.ops import q4nx
from flownpu.ops.definitions import q4nx_matmul, q4nx_unpack
from flownpu.ops.definitions.onnx_function import build, read

if TYPE_CHECKING:
    import onnx_ir as ir
    from numpy.typing import NDArray

NAME = "Q4NXMoE"

_LOGITS = {
    "": """
    router_float = Cast <to = 1> (router)
    router_columns = Transpose <perm = [1, 0]> (router_float)
    logits = MatMul (x, router_columns)""",
    "moved": """
    router_float = Cast <to = 1> (router)
    router_columns = Transpose <perm = [1, 0]> (router_float)
    product_of_router = MatMul (x, router_columns)
    logits = Add (product_of_router, logits_bias)""",
    "logits": """
    logits_shape = Concat <axis = 0> (any, num_experts)
    logits = Reshape <allowzero = 1> (router_logits, logits_shape)""",
}
_LARGEST = "largest, experts = TopK <axis = -1> (logits, k)"
_CHOICE = {
    "": f"{_LARGEST}  routing = Softmax <axis = -1> (largest)",
    "all": f"""{_LARGEST}
    probabilities = Softmax <axis = -1> (logits)
    routing = GatherElements <axis = 1> (probabilities, experts)""",
    "bias": """scores = Sigmoid (logits)
    biased = Add (scores, router_bias)
    largest, experts = TopK <axis = -1> (biased, k)
    shares = GatherElements <axis = 1> (scores, experts)
    sum_of_shares = ReduceSum <keepdims = 1> (shares, any)
    routing = Div (shares, sum_of_shares)""",
}

_GATE_UP_BIAS = (
    "gate = Identity (gate_product)  up = Identity (up_product)",
    """biases_of_expert = Gather <axis = 0> (gate_up_bias, expert_scalar)
        gate_bias, up_bias = Split <axis = 0, num_outputs = 2> (biases_of_expert)
        gate = Add (gate_product, gate_bias)
        up = Add (up_product, up_bias)""",
)
_EXPERT_SCALES = (
    "scaled_routing = Identity (routing)",
    "factors = Gather <axis = 0> (expert_scales, experts)  scaled_routing = Mul (routing, factors)",
)
_DOWN_BIAS = (
    "made = Identity (down_product)",
    """bias_of_answer = Gather <axis = 0> (down_bias, expert_scalar)
        made = Add (down_product, bias_of_answer)""",
)
_SCALED = """gate_limited = Min (gate, limit)
        up_limited = Clip (up, lowest, limit)
        steeper = Mul (gate_limited, alpha)
        sigmoid = Sigmoid (steeper)
        activated = Mul (gate_limited, sigmoid)
        factor = Add (up_limited, beta)"""
_SCALES = """
    alpha = Constant <value_float: float = @swiglu_alpha> ()
    beta = Constant <value_float: float = @swiglu_beta> ()
    given_limit = Constant <value_float: float = @swiglu_limit> ()
    nought = Constant <value_float = 0.0> ()
    largest_float = Constant <value_float = 3.4028234e38> ()
    is_limited = Greater (given_limit, nought)
    limit = Where (is_limited, given_limit, largest_float)
    lowest = Neg (limit)"""

# One iteration for each expert that a row has chosen. It gathers the rows of X that chose the expert, and adds the
# expert's results to the same rows of Y. The weights of other experts are not multiplied.
_BODY = """
    any = Constant <value_ints = [-1]> ()
    zero = Constant <value_ints = [0]> ()
    one = Constant <value_ints = [1]> ()
    two = Constant <value_ints = [2]> ()
    yes = Constant <value = bool {{1}}> ()
    width_scalar = Constant <value_int: int = @hidden_size> ()
    width = Reshape (width_scalar, any)
    row_shape = Concat <axis = 0> (any, width)
    x = Reshape <allowzero = 1> (X, row_shape)
    num_experts_scalar = Constant <value_int: int = @num_experts> ()
    num_experts = Reshape (num_experts_scalar, any)
    {logits}
    k_scalar = Constant <value_int: int = @experts_per_token> ()
    k = Reshape (k_scalar, any)
    {choice}
    {expert_scales}
    chosen = Unique <sorted = 1> (experts)
    trips = Size (chosen)

    codes_in, scale_in, minimum_in = ai.flownpu.Q4NXUnpack{inwards} (gate_up)
    codes_out, scale_out, minimum_out = ai.flownpu.Q4NXUnpack{outwards} (down)
    rows_in_all = Shape <start = 0, end = 1> (codes_in)
    rows_in = Div (rows_in_all, num_experts)
    rows_of_gate = Div (rows_in, two)
    rows_out_all = Shape <start = 0, end = 1> (codes_out)
    rows_out = Div (rows_out_all, num_experts)
    {scales}

    y_shape = Shape (x)
    nothing = ConstantOfShape <value = float[1] {{0}}> (y_shape)
    total = Loop (trips, yes, nothing) <body = expert_by_expert (int64 trip, bool go, float[R, D] before) =>
        (bool go_on, float[R, D] after) {{
        go_on = Identity (go)
        expert_scalar = Gather <axis = 0> (chosen, trip)
        expert = Reshape (expert_scalar, any)
        is_chosen = Equal (experts, expert)
        places = NonZero (is_chosen)
        rows, ranks = Split <axis = 0, num_outputs = 2> (places)
        row_list = Reshape (rows, any)
        taken = Gather <axis = 0> (x, row_list)
        gate_first = Mul (expert, rows_in)
        up_first = Add (gate_first, rows_of_gate)
        gate_product = ai.flownpu.Q4NXProject{inwards} <M: int = @expert_size, K: int = @hidden_size>
            (taken, codes_in, scale_in, minimum_in, gate_first)
        up_product = ai.flownpu.Q4NXProject{inwards} <M: int = @expert_size, K: int = @hidden_size>
            (taken, codes_in, scale_in, minimum_in, up_first)
        {gate_up_bias}
        {activation}
        product = Mul (activated, factor)
        down_first = Mul (expert, rows_out)
        down_product = ai.flownpu.Q4NXProject{outwards} <M: int = @hidden_size, K: int = @expert_size>
            (product, codes_out, scale_out, minimum_out, down_first)
        {down_bias}
        place_list = Transpose <perm = [1, 0]> (places)
        weight_list = GatherND (scaled_routing, place_list)
        weight = Unsqueeze (weight_list, one)
        weighted = Mul (made, weight)
        row_index = Unsqueeze (row_list, one)
        after = ScatterND <reduction = "add"> (before, row_index, weighted)
    }}>
    shape = Shape (X)
    Y = Reshape <allowzero = 1> (total, shape)
"""


def features(node: ir.Node) -> list[str]:
    """The variant of a node: which of "all" (a softmax over all experts), "bias", "geglu" and "logits" it has.

    "moved" stands for logits with a bias,
    "scaled" for a SwiGLU with other constants than silu(gate) * up, "inbias" and "outbias" for biases of gate_up
    and down, "factors" for expert_scales.
    "inbytes" and "outbytes" stand for weights of 8 bits, gate_up and down, "intable" and "outtable" for such as have
    tables.

    Raises:
        ValueError: The node does not fit the schema, or has not one of router and router_logits.
    """
    inputs, attributes = read(node)
    if (inputs["router"] is None) == (inputs["router_logits"] is None):
        got = "none" if inputs["router"] is None else "both"
        raise ValueError(f"[{NAME}] expected an input router, or router_logits, at node {node.name!r}, got {got}")
    experts, taken = attributes["num_experts"], attributes["experts_per_token"]
    if taken > experts:
        raise ValueError(
            f"[{NAME}] expected experts_per_token to be at most num_experts, {experts}, got {taken} at node "
            f"{node.name!r}"
        )
    if inputs["logits_bias"] is not None and inputs["router"] is None:
        raise ValueError(f"[{NAME}] expected a router beside logits_bias at node {node.name!r}, got router_logits")
    if inputs["router_bias"] is not None and not attributes["normalize_routing_weights"]:
        raise ValueError(f"[{NAME}] expected normalize_routing_weights of 1 beside a router_bias at node {node.name!r}")
    scaled = any(
        attributes[name] != usual for name, usual in (("swiglu_alpha", 1), ("swiglu_beta", 0), ("swiglu_limit", 0))
    )
    if scaled and attributes["gating"] != "swiglu":
        raise ValueError(f"[{NAME}] expected gating of swiglu beside its constants at node {node.name!r}")
    found = {
        "all": not attributes["normalize_routing_weights"],
        "geglu": attributes["gating"] == "geglu",
        "bias": inputs["router_bias"] is not None,
        "logits": inputs["router_logits"] is not None,
        "moved": inputs["logits_bias"] is not None,
        "scaled": scaled,
        "inbias": inputs["gate_up_bias"] is not None,
        "factors": inputs["expert_scales"] is not None,
        "outbias": inputs["down_bias"] is not None,
    }
    ways = (("in", "gate_up"), ("out", "down"))
    suffixes = [(way, q4nx_unpack.suffix_of(inputs[weight]).lower()) for way, weight in ways]
    return [feature for feature, there in found.items() if there] + [way + name for way, name in suffixes if name]


def function(overload: str) -> ir.Function:
    """The definition of one variant; `overload` is its features, joined by "_"."""
    found = overload.split("_")
    gating = "geglu" if "geglu" in found else "swiglu"
    body = _BODY.format(
        logits=_LOGITS[next((name for name in found if name in _LOGITS), "")],
        choice=_CHOICE["bias" if "bias" in found else "all" if "all" in found else ""],
        expert_scales=_EXPERT_SCALES["factors" in found],
        scales=_SCALES if "scaled" in found else "",
        gate_up_bias=_GATE_UP_BIAS["inbias" in found],
        activation=_SCALED if "scaled" in found else f"{q4nx_matmul.ACTIVATION[gating]}  factor = Identity (up)",
        down_bias=_DOWN_BIAS["outbias" in found],
        inwards=_suffix(found, "in"),
        outwards=_suffix(found, "out"),
    )
    return build(NAME, overload, body)


def _suffix(found: list[str], way: str) -> str:
    return q4nx_unpack.suffix_in([feature.removeprefix(way) for feature in found])


def helpers(overload: str) -> list[ir.Function]:
    """Functions that the variant's body calls."""
    found = overload.split("_")
    return q4nx_unpack.all_functions(_suffix(found, "in"), _suffix(found, "out"))


def route(
    logits: NDArray[np.float64],
    experts_per_token: int,
    *,
    normalize: bool = True,
    bias: NDArray[np.float64] | None = None,
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """The experts that each row of logits [..., E] chooses, best first, and their weights p; both [..., k]."""
    scores = logits if bias is None else 1 / (1 + np.exp(-logits))
    ranked = scores if bias is None else scores + bias
    order = np.argsort(-ranked, axis=-1, kind="stable")[..., :experts_per_token]
    if bias is not None:
        shares = np.take_along_axis(scores, order, -1)
        return order, shares / shares.sum(-1, keepdims=True)
    chosen = np.take_along_axis(logits, order, -1)
    top = logits.max(-1, keepdims=True)
    total = np.exp((chosen if normalize else logits) - top).sum(-1, keepdims=True)
    return order, np.exp(chosen - top) / total


def reference(
    x: NDArray[Any],
    router: NDArray[Any] | None,
    gate_up: NDArray[np.uint8],
    down: NDArray[np.uint8],
    router_logits: NDArray[Any] | None = None,
    router_bias: NDArray[Any] | None = None,
    gate_up_bias: NDArray[Any] | None = None,
    down_bias: NDArray[Any] | None = None,
    logits_bias: NDArray[Any] | None = None,
    expert_scales: NDArray[Any] | None = None,
    *,
    num_experts: int,
    experts_per_token: int,
    hidden_size: int,
    expert_size: int,
    normalize_routing_weights: int = 1,
    gating: str = "swiglu",
    swiglu_alpha: float = 1.0,
    swiglu_beta: float = 0.0,
    swiglu_limit: float = 0.0,
) -> NDArray[np.float64]:
    """Computes the operator in float64, from the float32 weights that the blocks stand for."""
    rows = x.reshape(-1, hidden_size).astype(np.float64)
    if router is not None:
        logits = rows @ router.astype(np.float64).T + (0 if logits_bias is None else logits_bias)
    elif router_logits is not None:
        logits = router_logits.reshape(-1, num_experts).astype(np.float64)
    else:
        raise ValueError(f"[{NAME}] expected router or router_logits, got neither")
    bias = None if router_bias is None else router_bias.astype(np.float64)
    experts, weights = route(logits, experts_per_token, normalize=bool(normalize_routing_weights), bias=bias)
    limit = swiglu_limit or np.inf
    y = np.zeros_like(rows)
    for e, (inner, outer) in enumerate(zip(np.split(gate_up, num_experts), np.split(down, num_experts), strict=True)):
        row, rank = np.nonzero(experts == e)
        gate, up = (
            rows[row] @ q4nx.dequantize(part, expert_size, hidden_size).T.astype(np.float64)
            for part in np.split(inner, 2)
        )
        if gate_up_bias is not None:
            gate, up = (part + bias for part, bias in zip((gate, up), np.split(gate_up_bias[e], 2), strict=True))
        gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
        act = q4nx_matmul.gelu(gate) if gating == "geglu" else q4nx_matmul.silu(swiglu_alpha * gate) / swiglu_alpha
        made = (act * (up + swiglu_beta)) @ q4nx.dequantize(outer, hidden_size, expert_size).T.astype(np.float64)
        if down_bias is not None:
            made = made + down_bias[e]
        y[row] += weights[row, rank][:, None] * made * (1 if expert_scales is None else expert_scales[e])
    return y.reshape(x.shape)
