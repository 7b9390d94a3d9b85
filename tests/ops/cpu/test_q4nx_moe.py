# SPDX-License-Identifier: Apache-2.0
"""Q4NXMoE on the CPU, for every instruction set of this machine: routing, experts, and independence of rows."""

from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from flownpu.ops import q4nx
from flownpu.ops.definitions import q4nx_matmul, q4nx_moe
from tests.ops.device import ISAS, Node, one
from tests.pairwise import pairwise

EPSILON = 2.0**-24  # half an ulp of 1 in float32: the relative error of one rounding
BF16 = 2.0**-9  # the same of bfloat16
# Sizes that do not fill whole groups of columns and blocks of rows, and sizes that do.
ODD, WHOLE = (100, 48), (256, 64)
BIAS = np.float32([0.3, -0.2, 0.1, 0, -0.3, 0.2])
CONSTANTS = (1, 2, 3, 5, 6, 7, 8, 9)
SCALES = {"swiglu_alpha": 1.702, "swiglu_beta": 1.0, "swiglu_limit": 0.7}


@dataclass(frozen=True)
class Mixture:
    """Weights of the operator, and its attributes."""

    router: np.ndarray
    gate_up: np.ndarray
    down: np.ndarray
    attributes: dict[str, Any]
    bias: np.ndarray | None = None
    # Biases of gate and up projections, of down projections, and of logits; factors of answers.
    biases: tuple[np.ndarray | None, ...] = (None, None, None, None)

    @property
    def inputs(self) -> list[np.ndarray | None]:
        given = [self.router, self.gate_up, self.down, None, self.bias, *self.biases]
        while given[-1] is None:
            given.pop()
        return given

    def expert(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """The blocks of an expert's gate and up projection, and of its down projection."""
        count = self.attributes["num_experts"]
        return np.split(self.gate_up, count)[index], np.split(self.down, count)[index]


def mixture(
    sizes: tuple[int, int] = ODD, experts: int = 6, taken: int = 2, layout: q4nx.Layout = q4nx.NARROW, **attributes: Any
) -> Mixture:
    hidden, inner = sizes
    rng = np.random.default_rng(hidden + experts)

    def weight(rows: int, columns: int) -> q4nx.Quantized:
        return q4nx.quantize(rng.standard_normal((rows, columns), dtype=np.float32) / np.float32(columns**0.5))

    router = rng.standard_normal((experts, hidden), dtype=np.float32) / np.float32(hidden**0.5)
    gate_up = [q4nx.pack_gated(weight(inner, hidden), weight(inner, hidden), layout) for _ in range(experts)]
    down = [q4nx.pack(*weight(hidden, inner), layout) for _ in range(experts)]
    sizes_of = {"num_experts": experts, "experts_per_token": taken, "hidden_size": hidden, "expert_size": inner}
    return Mixture(router, np.concatenate(gate_up), np.concatenate(down), {**sizes_of, **attributes})


def rows_of(count: int, columns: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, columns), dtype=np.float32)


def run(x: np.ndarray, of: Mixture, **options: str) -> np.ndarray:
    return one("Q4NXMoE", [x, *of.inputs], constants=CONSTANTS, options=options, **of.attributes)


def logits_of(x: np.ndarray, of: Mixture) -> tuple[np.ndarray, np.ndarray]:
    """Logits in float64, and the largest error of a row's logits in float32, where each of four or more lanes adds up a
    part of the columns, and then the lanes are added up."""
    logits = x.astype(np.float64) @ of.router.astype(np.float64).T
    if of.biases[2] is not None:
        logits = logits + of.biases[2]
    magnitude = np.abs(x.astype(np.float64)) @ np.abs(of.router.astype(np.float64)).T
    return logits, (x.shape[-1] / 4 + 8) * EPSILON * magnitude.max(-1, keepdims=True)


def decided_rows(count: int, of: Mixture) -> np.ndarray:
    """Rows whose choice of experts no rounding changes. A sigmoid is at most a quarter as steep as its logit."""
    x = rows_of(count + 20, of.attributes["hidden_size"])
    logits, error = logits_of(x, of)
    if of.bias is not None:
        logits = 1 / (1 + np.exp(-logits)) + of.bias
    last, next_one = np.sort(logits, axis=-1)[
        :, [-of.attributes["experts_per_token"], -of.attributes["experts_per_token"] - 1]
    ].T
    return x[last - next_one > 2 * error[:, 0]][:count]


def routed(x: np.ndarray, of: Mixture) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Each row's experts and their weights, and the relative error of a weight: twice that of the softmax's inputs, and
    16 for its own roundings (exp is good to some ulps)."""
    logits, error = logits_of(x, of)
    normalize = bool(of.attributes.get("normalize_routing_weights", 1))
    bias = None if of.bias is None else of.bias.astype(np.float64)
    experts, weights = q4nx_moe.route(logits, of.attributes["experts_per_token"], normalize=normalize, bias=bias)
    return experts, weights, 2 * error + 16 * EPSILON


def magnitudes(blocks: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """A bound of |weight| and of its two terms: |scale| * 15 + |minimum|."""
    _, scale, minimum = q4nx.unpack(blocks, rows, columns)
    largest = np.abs(scale.astype(np.float64)) * 15 + np.abs(minimum.astype(np.float64))
    return np.repeat(largest, 32, axis=1)[:, :columns]


@pytest.mark.parametrize(
    ("isa", "activations", "count", "attributes", "bias"),
    [
        *pairwise(
            ISAS, ["bf16", "int8"], [1, 7, 600], [{}, {"normalize_routing_weights": 0}, {"gating": "geglu"}], [None]
        ),
        *pairwise(ISAS, ["bf16", "int8"], [1, 7, 600], [{}], [BIAS]),
    ],
)
def test_expert_equals_two_products_of_its_rows(
    isa: str, activations: str, count: int, attributes: dict[str, Any], bias: np.ndarray | None
) -> None:
    """Against Q4NXMatMul on each expert's rows; the experts' answers for 600 rows are too large to be kept."""
    of = replace(mixture(WHOLE, taken=4, **attributes), bias=bias)
    hidden, inner = WHOLE
    gating = attributes.get("gating", "swiglu")
    x = decided_rows(count, of)
    experts, weights, weight_error = routed(x, of)
    options = {"cpu_isa": isa, "activations": activations}
    expected, bound = np.zeros((2, count, hidden))
    for e in range(6):
        row, rank = np.nonzero(experts == e)
        if not row.size:
            continue
        gate_up, down = of.expert(e)
        product = one(
            "Q4NXMatMul", [x[row], gate_up], constants=(1,), options=options, M=inner, K=hidden, gating=gating
        )
        answer = one("Q4NXMatMul", [product, down], constants=(1,), options=options, M=hidden, K=inner)
        weight = weights[row, rank][:, None]
        expected[row] += weight * answer
        # A product and a sum for each expert, of which at most four are added up.
        bound[row] += weight * np.abs(answer) * (weight_error[row] + 5 * EPSILON)
    assert np.all(np.abs(run(x, of, **options) - expected) <= bound)


def biased(of: Mixture, *kept: int) -> Mixture:
    """The mixture with biases, of which those at the places `kept` stay; of logits as far apart as these."""
    sizes = of.attributes
    shapes = ((2 * sizes["expert_size"],), (sizes["hidden_size"],), (), ())
    rng = np.random.default_rng(5)
    biases = [rng.standard_normal((sizes["num_experts"], *shape), dtype=np.float32) for shape in shapes]
    return replace(of, biases=tuple(bias if place in kept else None for place, bias in enumerate(biases)))


@pytest.mark.parametrize(
    ("isa", "count", "kept", "scales"),
    # Biases of gate and up, of down, of logits, and factors: all, and each alone.
    pairwise(ISAS, [1, 7, 600], [(0, 1, 2, 3), (0,), (1,), (2,), (3,)], [{}, SCALES]),
)
def test_biases_and_scales_equal_products_of_experts(
    isa: str, count: int, kept: tuple[int, ...], scales: dict[str, float]
) -> None:
    """Against Q4NXMatMul without a gate on each expert's rows, of odd sizes; the gate is here, in float64.

    Products of the same rows have the same bits. Answers for 600 rows of these sizes are kept, for more they are not:
    see test_row_has_same_bits_in_every_batch.
    """
    of = biased(mixture(ODD, taken=3, **scales), *kept)
    hidden, inner = ODD
    x = decided_rows(count, of)
    experts, weights, weight_error = routed(x, of)
    options = {"cpu_isa": isa, "activations": "bf16"}
    gate_up_bias, down_bias = (np.zeros((6, n)) if b is None else b for b, n in zip(of.biases, (96, 100), strict=False))
    alpha, beta, limit = (scales.get(name, usual) for name, usual in zip(SCALES, (1.0, 0.0, np.inf), strict=True))
    expected, bound = np.zeros((2, count, hidden))
    for e in range(6):
        row, rank = np.nonzero(experts == e)
        if not row.size:
            continue
        gate_up, down = of.expert(e)
        sizes = {"M": inner, "K": hidden}
        gate, up = (
            one("Q4NXMatMul", [x[row], blocks], constants=(1,), options=options, **sizes) + bias
            for blocks, bias in zip(np.split(gate_up, 2), np.split(gate_up_bias[e], 2), strict=True)
        )
        gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
        inside = (q4nx_matmul.silu(alpha * gate) / alpha * (up + beta)).astype(np.float32)
        sizes = {"M": hidden, "K": inner}
        answer = one("Q4NXMatMul", [inside, down], constants=(1,), options=options, **sizes) + down_bias[e]
        weight = weights[row, rank][:, None] * (1 if of.biases[3] is None else of.biases[3][e])
        expected[row] += weight * answer
        # The inputs of the down projection are rounded to bfloat16, here and there on the same or the neighbouring
        # number: an ulp of bfloat16 between them. Sums of the gate are off by some 24 roundings of float32.
        reach = np.abs(inside).astype(np.float64) @ magnitudes(down, hidden, inner).T
        bound[row] += np.abs(weight) * (
            np.abs(answer) * (weight_error[row] + 7 * EPSILON) + (2 * BF16 + 24 * EPSILON) * reach
        )
    assert np.all(np.abs(run(x, of, **options) - expected) <= bound)
    # Biases and limits that are not applied would be far outside of the bound.
    plain = replace(
        of,
        biases=(None, None, of.biases[2], None),
        attributes={k: v for k, v in of.attributes.items() if k not in SCALES},
    )
    if kept != (2,) or scales:
        assert np.abs(run(x, plain, **options) - expected).max() > 4 * bound.max()


@pytest.mark.parametrize(
    ("place", "shape", "message"),
    [
        (0, (6, 48), r"expected gate_up_bias of shape \[6,96\], got \[6,48\]"),
        (1, (5, 100), r"expected down_bias of shape \[6,100\], got \[5,100\]"),
        (2, (5,), r"expected logits_bias of shape \[6\], got \[5\]"),
        (3, (5,), r"expected expert_scales of shape \[6\], got \[5\]"),
    ],
)
def test_biases_of_other_shapes_are_refused(place: int, shape: tuple[int, ...], message: str) -> None:
    biases: list[np.ndarray | None] = [None] * 4
    biases[place] = np.zeros(shape, np.float32)
    with pytest.raises(ValueError, match=message):
        run(rows_of(1, ODD[0]), replace(mixture(), biases=tuple(biases)))
    with pytest.raises(ValueError, match="expected normalize_routing_weights to be 1 beside a router_bias"):
        run(rows_of(1, ODD[0]), replace(mixture(normalize_routing_weights=0), bias=BIAS))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("has_biases", [False, True])
def test_row_has_same_bits_in_every_batch(isa: str, has_biases: bool) -> None:
    of = mixture(WHOLE, experts=8, taken=4, **(SCALES if has_biases else {}))
    if has_biases:
        of = biased(of, 0, 1, 2, 3)
    x = rows_of(600, WHOLE[0])
    options = {"cpu_isa": isa, "activations": "bf16"}
    node = Node("Q4NXMoE", [x, *of.inputs], constants=CONSTANTS, options=options, **of.attributes)
    (whole,) = node(x, *of.inputs)
    for split in (1, 5, 300):
        parts = [node(np.ascontiguousarray(x[i : i + split]), *of.inputs)[0] for i in range(0, 50, split)]
        np.testing.assert_array_equal(np.concatenate(parts), whole[: len(parts) * split])


@pytest.mark.parametrize("activations", ["bf16", "int8"])
def test_threads_change_no_bit(activations: str) -> None:
    of = mixture(WHOLE, experts=8, taken=4)
    for count in (1, 9, 600):
        x = rows_of(count, WHOLE[0])
        alone, shared = (run(x, of, activations=activations, threads=str(threads)) for threads in (1, 3))
        np.testing.assert_array_equal(shared, alone)


@pytest.mark.parametrize("count", [1, 9])
def test_layouts_and_types_of_weights_change_no_bit(count: int) -> None:
    x = rows_of(count, WHOLE[0])
    narrow, wide = (mixture(WHOLE, layout=layout) for layout in (q4nx.NARROW, q4nx.WIDE))
    rounded = narrow.router.astype(ml_dtypes.bfloat16)
    expected = run(x, replace(narrow, router=rounded.astype(np.float32)))
    assert np.abs(expected).max() > 0
    np.testing.assert_array_equal(run(x, replace(wide, router=rounded)), expected)


def untouchable(of: Mixture, experts: list[int]) -> Mixture:
    """The mixture with NaN in all scales of some experts: an answer that read them is NaN."""
    gate_up, down = of.gate_up.copy(), of.down.copy()
    for blocks in (gate_up, down):
        parts = blocks.reshape(of.attributes["num_experts"], -1, *blocks.shape[1:])
        parts[experts, ..., :128] = 0xFF
    return replace(of, gate_up=gate_up, down=down)


def constant_router(of: Mixture, order: list[int]) -> tuple[Mixture, np.ndarray]:
    """A router that ranks experts in this order for every row whose first column is 1; and that column."""
    router = np.zeros_like(of.router)
    router[order, 0] = -np.arange(len(order), dtype=np.float32)
    return replace(of, router=router), np.float32([1.0])


@pytest.mark.parametrize("activations", ["bf16", "int8"])
@pytest.mark.parametrize("count", [1, 30, 700])
def test_unchosen_experts_are_not_read(activations: str, count: int) -> None:
    of, first = constant_router(mixture(WHOLE, experts=5, taken=2), [3, 1, 0, 2, 4])
    x = rows_of(count, WHOLE[0])
    x[:, :1] = first
    expected = run(x, of, activations=activations)
    assert np.isfinite(expected).all()
    np.testing.assert_array_equal(run(x, untouchable(of, [0, 2, 4]), activations=activations), expected)
    assert np.isnan(run(x, untouchable(of, [1]), activations=activations)).any()


@pytest.mark.parametrize("isa", ISAS)
def test_equal_logits_choose_lower_expert(isa: str) -> None:
    """Experts 1, 2 and 4 are equally good: the two lower ones answer, each with half of the weight."""
    of = mixture(experts=6, taken=2)
    router = np.zeros_like(of.router)
    router[[1, 2, 4], 0] = 2
    of = replace(of, router=router)
    x = rows_of(5, ODD[0])
    x[:, 0] = 1
    y = run(x, untouchable(of, [0, 3, 4, 5]), cpu_isa=isa)
    alone = {**of.attributes, "experts_per_token": 1}
    apart = []
    for best in (1, 2):
        only, _ = constant_router(of, [best, *({0, 1, 2, 3, 4, 5} - {best})])
        apart.append(run(x, replace(only, attributes=alone), cpu_isa=isa))
    # Halves are exact; the sum is rounded, and so are the sums of one term that it compares with.
    np.testing.assert_allclose(y, (apart[0] + apart[1]) / 2, rtol=0, atol=4 * EPSILON * np.abs(apart).max())


@pytest.mark.parametrize("leading", [(1,), (2, 3), (700,)])
@pytest.mark.parametrize("normalize", [0, 1])
def test_given_router_logits_equal_computed_ones(leading: tuple[int, ...], normalize: int) -> None:
    """The bits are those with a router: in four columns of multiples of 1/4, products and their sums are exact."""
    of = mixture(WHOLE, experts=5, taken=2, normalize_routing_weights=normalize)
    router = np.zeros_like(of.router)
    x = rows_of(int(np.prod(leading)), WHOLE[0]).reshape(*leading, -1)
    router[:, :4], x[..., :4] = (np.round(4 * part) / 4 for part in (rows_of(5, 4, seed=9), x[..., :4]))
    expected = run(x, replace(of, router=router))
    logits = x[..., :4] @ router[:, :4].T
    for given in (logits, logits.reshape(-1, 5)):
        found = one("Q4NXMoE", [x, None, of.gate_up, of.down, given], constants=(2, 3), **of.attributes)
        np.testing.assert_array_equal(found, expected)


def test_nan_row_leaves_other_rows_unchanged() -> None:
    of = mixture()
    x = rows_of(6, ODD[0])
    expected = run(x, of)
    x[2, 5] = np.nan
    y = run(x, of)
    assert np.isnan(y[2]).all()
    np.testing.assert_array_equal(np.delete(y, 2, 0), np.delete(expected, 2, 0))


def test_leading_axes_are_kept() -> None:
    of = mixture()
    x = rows_of(6, ODD[0])
    np.testing.assert_array_equal(run(x.reshape(2, 3, -1), of).reshape(6, -1), run(x, of))
    assert run(x[:0], of).shape == (0, ODD[0])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"experts_per_token": 7}, "expected experts_per_token to be at most num_experts, 6, got 7"),
        ({"experts_per_token": 0}, "experts_per_token"),
        ({"num_experts": 5}, r"expected a router of shape \[5,100\], got \[6,100\]"),
        ({"expert_size": 80}, r"expected weight 'input2' of shape \[36,4,640\], got \[24,4,640\]"),
        ({"gating": "relu"}, "swiglu"),
        ({"gating": "geglu", "swiglu_limit": 7.0}, "expected gating to be swiglu beside swiglu_alpha"),
        ({"swiglu_limit": -1.0}, "swiglu_limit"),
        ({"normalize_routing_weights": 2}, "normalize_routing_weights"),
    ],
)
def test_wrong_attributes_are_refused(wrong: dict[str, Any], message: str) -> None:
    of = mixture()
    with pytest.raises(ValueError, match=message):
        run(rows_of(1, ODD[0]), replace(of, attributes={**of.attributes, **wrong}))


@pytest.mark.parametrize("shape", [(2, 5), (3, 6), (12,)])
def test_router_logits_of_other_shape_are_refused(shape: tuple[int, ...]) -> None:
    of = mixture()
    inputs = [rows_of(2, ODD[0]), None, of.gate_up, of.down, np.zeros(shape, np.float32)]
    with pytest.raises(ValueError, match="expected router_logits of 2 x 6"):
        one("Q4NXMoE", inputs, constants=(2, 3), **of.attributes)


@pytest.mark.parametrize("both", [True, False])
def test_router_and_logits_both_or_neither_are_refused(both: bool) -> None:
    of = mixture()
    logits = np.zeros((2, 6), np.float32) if both else None
    inputs = [rows_of(2, ODD[0]), of.router if both else None, of.gate_up, of.down, logits]
    with pytest.raises(
        ValueError, match=f"expected an input router, or router_logits, got {'both' if both else 'none'}"
    ):
        one("Q4NXMoE", inputs, constants=(1, 2, 3) if both else (2, 3), **of.attributes)


def test_rows_of_another_width_are_refused() -> None:
    with pytest.raises(ValueError, match=r"expected X of shape \[.., 100\], got \[2,99\]"):
        run(rows_of(2, 99), mixture())
