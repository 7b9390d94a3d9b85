# SPDX-License-Identifier: Apache-2.0
"""Cases of the kernels of Q4NX products and of the embedding, in each layout of the weight.

Tolerances follow from the order of a sum: a term that takes part in n additions gets at most n roundings, each at most
F32 times the running sum's magnitude, which is no larger than the sum of all magnitudes.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial

import numpy as np

from flownpu.ops import q4nx
from flownpu.ops.definitions import q4nx_moe
from flownpu.selftest.gpu.case import F32, HALF, LEAST_HALF, Case, Expected

Rng = np.random.Generator

LAYOUTS = {
    "narrow": q4nx.NARROW,
    "symmetric": q4nx.SYMMETRIC,
    "wide": q4nx.WIDE,
    "8 bits": q4nx.EIGHT_BITS_WITH_MINIMA,
    "table": q4nx.TABLE,
}
_GROUP = 32
# Roundings beside those of the sum over groups: the sums of 32 lanes, the weight (3), its product, bias and residual.
_OTHERS = 40
# Errors of a gate's activation in F32: tanh's 5 units in the last place (OpenCL's bound), and the roundings around it.
_GATING = 10
# A quotient is off by 2.5 units (OpenCL's bound), so an activation this near the middle of two integers may become
# either.
_AMBIGUOUS = 127 * 8 * F32
# The smallest normal float16 over the largest number that a token's activations are scaled to
# (q4nx_matmul_of_matrices).
_LEAST = LEAST_HALF / (127 * 256)
_MOST_SLOPE = 1.13  # largest slope of GELU; SiLU's is 1.1, that of its kin x sigmoid(a x), too
_EXPERTS, _CHOSEN, _HIDDEN, _INNER = 5, 3, 70, 45
_CLEAR = 1e-3  # by how much the last expert chosen is better than the next, so that no rounding changes the choice


def products() -> Iterator[tuple[str, Callable[[Rng], Case]]]:
    """Pairs of a case's name and the function that makes the case; no size is a multiple of a block's size."""
    for layout in LAYOUTS:
        yield f"fused_dqp, {layout}", partial(_product, layout, 77, 345, 1)
        yield f"q4nx_matmul int8, {layout}", partial(_product, layout, 77, 345, 19)
        yield f"q4nx_gather, {layout}", partial(_gather, layout, 77, 345)
    # Work-groups of two and four teams on a device of two compute units; the cases above, of few rows, have one team.
    yield "fused_dqp, many rows", partial(_product, "narrow", 300, 345, 1)
    yield "fused_dqp, some rows", partial(_product, "wide", 130, 345, 1)
    yield "fused_dqp, bias and residual", partial(_product, "narrow", 33, 65, 1, bias=True, residual=True)
    yield "fused_dqp, geglu and residual", partial(_product, "narrow", 45, 130, 1, gating="geglu", residual=True)
    yield "fused_dqp, swiglu", partial(_product, "symmetric", 45, 31, 1, gating="swiglu")
    yield "fused_dqp, several rows", partial(_product, "narrow", 40, 100, 5, activations="bf16")
    yield "q4nx_matmul int8, bias and residual", partial(_product, "narrow", 33, 65, 3, bias=True, residual=True)
    yield "q4nx_matmul int8, geglu", partial(_product, "narrow", 45, 130, 17, gating="geglu")
    yield "experts, one row", partial(_mixture, "narrow", 1)
    yield "experts, not rounded", partial(_mixture, "symmetric", 70, gating="geglu", normalizes=False)
    yield "experts, not rounded as in gpt-oss", partial(_mixture, "table", 9, biases=True)
    yield "experts int8", partial(_mixture, "wide", 130, activations="int8")
    yield "experts int8 as in gpt-oss", partial(_mixture, "table", 130, activations="int8", biases=True)
    yield "experts int8, ranked with a bias", partial(_mixture, "8 bits", 21, activations="int8", ranks=True)


def products_of_images() -> Iterator[tuple[str, Callable[[Rng], Case]]]:
    """Cases whose weight is stored in an OpenCL image."""
    for layout in LAYOUTS:
        yield f"fused_dqp, {layout}, image", partial(_product, layout, 77, 345, 1, storage="image")
        yield f"q4nx_matmul int8, {layout}, image", partial(_product, layout, 77, 345, 19, storage="image")


def products_of_matrices() -> Iterator[tuple[str, Callable[[Rng], Case]]]:
    """Cases that are multiplied by matrix units."""
    of_matrices = partial(partial, _product, matrices="on")
    for layout in LAYOUTS:
        yield f"q4nx_matmul_of_matrices, {layout}", of_matrices(layout, 77, 345, 70)
    yield "q4nx_matmul_of_matrices, bias and residual", of_matrices("narrow", 33, 65, 3, bias=True, residual=True)
    yield "q4nx_matmul_of_matrices, geglu", of_matrices("narrow", 45, 130, 17, gating="geglu")
    yield "experts by matrices", partial(_mixture, "table", 130, activations="int8", biases=True, matrices="on")


def large_products(*, images: bool) -> Iterator[tuple[str, Callable[[Rng], Case]]]:
    """Cases large enough for their rates to mean something."""
    yield "fused_dqp, 2048 x 2048", partial(_product, "narrow", 2048, 2048, 1)
    if images:
        yield "fused_dqp, 2048 x 2048, image", partial(_product, "narrow", 2048, 2048, 1, storage="image")
    yield "q4nx_matmul int8, 64 rows x 1024 x 1024", partial(_product, "narrow", 1024, 1024, 64)


def _weight(rng: Rng, layout: q4nx.Layout, rows: int, columns: int) -> tuple[q4nx.Bytes, np.ndarray, np.ndarray]:
    """A random weight: its blocks, its values, and the sums of its terms' magnitudes; float64 [rows, columns]."""
    groups = -(-columns // _GROUP)
    codes: np.ndarray = rng.integers(0, 16, (rows, columns)).astype(np.uint8)
    scale = rng.uniform(0.01, 0.05, (rows, groups)).astype(q4nx.BFLOAT16)
    minimum = (-8 * scale.astype(np.float32)) if not layout.minima else rng.uniform(-0.4, 0.1, (rows, groups))
    if layout.unpacked_bits == 8:
        step = 16 if layout.table else 1
        codes = (rng.integers(-128 // step, 128 // step, (rows, columns)) * step).astype(np.int8)
        minimum *= layout.minima
    blocks = q4nx.pack(codes, scale, minimum.astype(q4nx.BFLOAT16), layout)
    weight = q4nx.dequantize(blocks, rows, columns).astype(np.float64)
    least = np.abs(minimum.astype(q4nx.BFLOAT16).astype(np.float64)).repeat(_GROUP, axis=1)[:, :columns]
    return blocks, weight, 2 * least + np.abs(weight)


def _product(
    layout: str, rows: int, columns: int, tokens: int, rng: Rng, *, gating: str = "none", bias: bool = False,
    residual: bool = False, activations: str = "int8", storage: str = "auto", matrices: str = "auto",
) -> Case:  # fmt: skip
    x = rng.standard_normal((tokens, columns), dtype=np.float32)
    parts = 1 if gating == "none" else 2
    weights = [_weight(rng, LAYOUTS[layout], rows, columns) for _ in range(parts)]
    rounds = tokens > 1 and activations == "int8"
    rounds_to_halves = matrices == "on"
    pairs = [
        _multiplied(x, weight, magnitude, rounds=rounds, rounds_to_halves=rounds_to_halves)
        for _, weight, magnitude in weights
    ]
    y, tolerance = pairs[0] if gating == "none" else _gated(gating, *pairs[0], *pairs[1])
    addends = {
        "bias": rng.standard_normal(rows, dtype=np.float32) if bias else None,
        "residual": rng.standard_normal((tokens, rows), dtype=np.float32) if residual else None,
    }
    for addend in addends.values():
        if addend is not None:
            y = y + addend
            tolerance = tolerance + F32 * (np.abs(y) + np.abs(addend))
    blocks = np.concatenate([blocks for blocks, _, _ in weights])
    return Case(
        op_type="FusedDQP" if tokens == 1 else "Q4NXMatMul", inputs=[x, blocks, *addends.values()],
        expected={0: Expected(y, tolerance)}, attributes={"M": rows, "K": columns, "gating": gating}, constants=[1],
        options={name: chosen for name, chosen, usual in (
            ("activations", activations, "int8"), ("gpu_weights", storage, "auto"),
            ("gpu_matrices", matrices, "auto"),
        ) if chosen != usual}, read=blocks.nbytes,
        operations=2 * tokens * parts * rows * columns,
    )  # fmt: skip


def _multiplied(
    x: np.ndarray, weight: np.ndarray, magnitude: np.ndarray, *, rounds: bool, rounds_to_halves: bool
) -> tuple[np.ndarray, np.ndarray]:
    """The product with a weight, float64 [tokens, rows], and its tolerance."""
    rounded = x.astype(np.float64)
    doubtful = np.zeros_like(rounded)
    if rounds:
        rounded, doubtful = _rounded(x)
    additions = -(-x.shape[1] // _GROUP) + _OTHERS
    tolerance = additions * F32 * (np.abs(rounded) @ magnitude.T) + doubtful @ np.abs(weight).T
    if rounds_to_halves:
        # Each factor is off by at most HALF of itself; below the smallest normal number, with which its group's scale
        # makes it _LEAST of the token's largest magnitude, it may become 0.
        tolerance += 2 * HALF * (np.abs(rounded) @ np.abs(weight).T)
        tolerance += _LEAST * np.abs(rounded).max(axis=1, keepdims=True) * np.abs(weight).sum(axis=1)
        tolerance += 2.0**-14 * np.abs(rounded).sum(axis=1, keepdims=True)  # likewise of a weight
    return rounded @ weight.T, tolerance


def _rounded(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The values of x rounded to int8 with a scale per 32 columns; and one step of it where either integer is right."""
    columns = x.shape[1]
    groups = np.pad(x, ((0, 0), (0, -columns % _GROUP))).reshape(len(x), -1, _GROUP).astype(np.float64)
    scale = np.abs(groups).max(axis=2, keepdims=True) / 127
    exact = groups / np.maximum(scale, 1e-300)
    doubtful = np.abs(np.abs(exact - np.floor(exact)) - 0.5) < _AMBIGUOUS
    values, steps = np.rint(exact) * scale, doubtful * scale
    return values.reshape(len(x), -1)[:, :columns], steps.reshape(len(x), -1)[:, :columns]


def _gated(
    gating: str, gate: np.ndarray, of_gate: np.ndarray, up: np.ndarray, of_up: np.ndarray, alpha: float = 1
) -> tuple[np.ndarray, np.ndarray]:
    """act(gate) * up, and its tolerance: from both factors' tolerances, and from the activation's own error."""
    inner = np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3) if gating == "geglu" else alpha * gate / 2
    activated = 0.5 * gate * (1 + np.tanh(inner))
    off = _MOST_SLOPE * of_gate + _GATING * F32 * np.abs(gate)
    return activated * up, off * (np.abs(up) + of_up) + np.abs(activated) * of_up + F32 * np.abs(activated * up)


def _mixture(
    layout: str, tokens: int, rng: Rng, *, gating: str = "swiglu", activations: str = "bf16", biases: bool = False,
    ranks: bool = False, normalizes: bool = True, matrices: str = "auto",
) -> Case:  # fmt: skip
    router = rng.standard_normal((_EXPERTS, _HIDDEN), dtype=np.float32) / np.float32(_HIDDEN**0.5)
    by_expert = {"gate_up_bias": 2 * _INNER, "down_bias": _HIDDEN} if biases else {}
    vectors = {name: rng.standard_normal((_EXPERTS, size), dtype=np.float32) for name, size in by_expert.items()}
    of_experts = ["router_bias"] * ranks + ["logits_bias", "expert_scales"] * biases
    vectors |= {name: rng.uniform(0.5, 1.5, _EXPERTS).astype(np.float32) for name in of_experts}
    x, experts, shares = _decided(rng, tokens, router, vectors, normalizes=normalizes)
    rounds = tokens > 1 and activations == "int8"
    swiglu = {"swiglu_alpha": 1.702, "swiglu_beta": 1.0, "swiglu_limit": 1.5} if biases else {}
    limit = swiglu.get("swiglu_limit", np.inf)
    y, tolerance = np.zeros(x.shape), np.zeros(x.shape)
    blocks: tuple[list[q4nx.Bytes], list[q4nx.Bytes]] = ([], [])
    for e in range(_EXPERTS):
        row, rank = np.nonzero(experts == e)
        pairs = []
        for part in range(2):
            packed, weight, magnitude = _weight(rng, LAYOUTS[layout], _INNER, _HIDDEN)
            blocks[0].append(packed)
            made, off = _multiplied(x[row], weight, magnitude, rounds=rounds, rounds_to_halves=matrices == "on")
            bias = vectors["gate_up_bias"][e, part * _INNER : (part + 1) * _INNER] if biases else 0
            pairs.append((np.clip(made + bias, -limit if part else None, limit), off + F32 * np.abs(made + bias)))
        (gate, of_gate), (up, of_up) = pairs
        beta = swiglu.get("swiglu_beta", 0)
        inside, off = _gated(gating, gate, of_gate, up + beta, of_up, swiglu.get("swiglu_alpha", 1))
        packed, weight, magnitude = _weight(rng, LAYOUTS[layout], _HIDDEN, _INNER)
        blocks[1].append(packed)
        # The device rounds numbers with errors of their own, so each is off by half a step of the largest.
        step = (np.abs(inside) + off).max(axis=1, initial=0, keepdims=True) / 127 if rounds else 0
        made, of_made = _multiplied(inside, weight, magnitude, rounds=False, rounds_to_halves=matrices == "on")
        of_made = of_made * (1 + step) + (off + step / 2) @ np.abs(weight).T
        made = made + (vectors["down_bias"][e] if biases else 0)
        share = (shares[row, rank] * (vectors["expert_scales"][e] if biases else 1))[:, None]
        # A logit is off by the roundings of a sum of _HIDDEN terms, its share by twice that, exp and the quotient.
        of_share = (2 * _HIDDEN * np.abs(x[row]).max(initial=1) + _EXPERTS + 16) * F32
        y[row] += share * made
        tolerance[row] += share * (of_made + (of_share + _CHOSEN * F32) * np.abs(made))
    names = ["router_logits", "router_bias", "gate_up_bias", "down_bias", "logits_bias", "expert_scales"]
    inputs = [x, router, np.concatenate(blocks[0]), np.concatenate(blocks[1]), *(vectors.get(name) for name in names)]
    return Case(
        op_type="Q4NXMoE", inputs=inputs, expected={0: Expected(y, tolerance)},
        constants=[i for i in range(1, len(inputs)) if inputs[i] is not None],
        attributes={
            "num_experts": _EXPERTS, "experts_per_token": _CHOSEN, "hidden_size": _HIDDEN, "expert_size": _INNER,
            "gating": gating, "normalize_routing_weights": int(normalizes), **swiglu,
        },
        options={"activations": activations} | ({"gpu_matrices": matrices} if matrices == "on" else {}),
    )  # fmt: skip


def _decided(
    rng: Rng, tokens: int, router: np.ndarray, vectors: Mapping[str, np.ndarray], *, normalizes: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows with a clear choice of experts, these experts, and their shares."""
    x = rng.standard_normal((2 * tokens + 8, _HIDDEN), dtype=np.float32)
    logits = x.astype(np.float64) @ router.T.astype(np.float64) + vectors.get("logits_bias", 0)
    bias = vectors.get("router_bias")
    ranked = logits if bias is None else 1 / (1 + np.exp(-logits)) + bias
    order = np.sort(ranked, axis=-1)
    clear = np.nonzero(order[:, -_CHOSEN] - order[:, -_CHOSEN - 1] > _CLEAR)[0][:tokens]
    bias = None if bias is None else bias.astype(np.float64)
    return x[clear], *q4nx_moe.route(logits[clear], _CHOSEN, normalize=normalizes, bias=bias)


def _gather(layout: str, rows: int, columns: int, rng: Rng) -> Case:
    blocks, weight, magnitude = _weight(rng, LAYOUTS[layout], rows, columns)
    indices = rng.integers(0, rows, (2, 3))
    return Case(
        op_type="Q4NXGather", inputs=[blocks, indices], attributes={"M": rows, "K": columns}, constants=[0],
        expected={0: Expected(weight[indices], 3 * F32 * magnitude[indices])},
    )  # fmt: skip
