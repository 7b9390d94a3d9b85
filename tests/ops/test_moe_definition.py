# SPDX-License-Identifier: Apache-2.0
"""Q4NXMoE's function in stock ONNX Runtime, against the equation, and the refused nodes."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from flownpu.ops import q4nx
from flownpu.ops.definitions import q4nx_moe
from tests.ops.stock_onnxruntime import model_of, node, run, value, with_functions

EXPERTS, TAKEN, HIDDEN, INNER = 6, 2, 100, 48
SIZES = {"num_experts": EXPERTS, "experts_per_token": TAKEN, "hidden_size": HIDDEN, "expert_size": INNER}
NAMES = ("router", "gate_up", "down")
BIAS = np.float32([0.3, -0.2, 0.1, 0, -0.3, 0.2])


def weights(layout: q4nx.Layout = q4nx.NARROW) -> list[np.ndarray]:
    rng = np.random.default_rng(0)

    def quantized(rows: int, columns: int) -> q4nx.Quantized:
        return q4nx.quantize(rng.standard_normal((rows, columns), dtype=np.float32) / np.float32(columns**0.5))

    router = rng.standard_normal((EXPERTS, HIDDEN), dtype=np.float32) / np.float32(HIDDEN**0.5)
    gate_up = [
        q4nx.pack_gated(quantized(INNER, HIDDEN), quantized(INNER, HIDDEN), layout=layout) for _ in range(EXPERTS)
    ]
    down = [q4nx.pack(*quantized(HIDDEN, INNER), layout) for _ in range(EXPERTS)]
    return [router, np.concatenate(gate_up), np.concatenate(down)]


def compute(x: np.ndarray, given: list[np.ndarray], bias: np.ndarray | None = None, **attributes: Any) -> np.ndarray:
    """Runs one node whose weights are initializers, as in every model."""
    rows, constants = value("X", x), [value(name, array) for name, array in zip(NAMES, given, strict=True)]
    biases = [None, value("router_bias", bias)] if bias is not None else []
    nodes = [node("Q4NXMoE", [rows, *constants, *biases], **SIZES, **attributes)]
    arrays = [*given, *([bias] if bias is not None else [])]
    model = model_of(nodes, [rows], dict(zip([*constants, *biases[1:]], arrays, strict=True)))
    return run(with_functions(model), {"X": x})[0]


@pytest.mark.parametrize("leading", [(5,), (2, 3), (1,), (0,)])
@pytest.mark.parametrize("attributes", [{}, {"normalize_routing_weights": 0}, {"gating": "geglu"}], ids=str)
def test_moe_function_equals_equation(leading: tuple[int, ...], attributes: dict[str, Any]) -> None:
    x = np.random.default_rng(1).standard_normal((*leading, HIDDEN), dtype=np.float32)
    given = weights()
    expected = q4nx_moe.reference(x, *given, **SIZES, **attributes)
    y = compute(x, given, **attributes)
    assert y.shape == x.shape
    # A sum of HIDDEN terms, then one of INNER, each in any order, of numbers around 1; a factor of 4, since codes and
    # minima are summed apart and cancel in part.
    np.testing.assert_allclose(y, expected, rtol=0, atol=4 * (HIDDEN + INNER) * 2.0**-24)


def test_biased_choice_equals_equation() -> None:
    x, bias = np.random.default_rng(1).standard_normal((40, HIDDEN), dtype=np.float32), BIAS
    given = weights()
    expected = q4nx_moe.reference(x, *given, None, bias, **SIZES)
    assert np.abs(expected - q4nx_moe.reference(x, *given, **SIZES)).max() > 0.1
    # As above; the weights of experts are sigmoids of logits that are off by as much.
    np.testing.assert_allclose(compute(x, given, bias), expected, rtol=0, atol=4 * (HIDDEN + INNER) * 2.0**-24)


BIASES = ("gate_up_bias", "down_bias", "logits_bias", "expert_scales")
SCALES = {"swiglu_alpha": 1.702, "swiglu_beta": 1.0, "swiglu_limit": 0.7}


@pytest.mark.parametrize("scales", [{}, SCALES, {"swiglu_alpha": 0.5}], ids=["plain", "scaled", "alpha"])
@pytest.mark.parametrize("names", [BIASES, *((name,) for name in BIASES), ()], ids="-".join)
def test_biases_and_scales_equal_equation(names: tuple[str, ...], scales: dict[str, float]) -> None:
    """Each bias alone and all together; about half of the gates and up projections are beyond the limit."""
    rng = np.random.default_rng(1)
    shapes = dict(zip(BIASES, ((EXPERTS, 2 * INNER), (EXPERTS, HIDDEN), (EXPERTS,), (EXPERTS,)), strict=True))
    biases = {name: rng.standard_normal(shapes[name], dtype=np.float32) for name in names}
    x, given = rng.standard_normal((40, HIDDEN), dtype=np.float32), weights()
    inputs = [value(name, array) for name, array in zip(("X", *NAMES), (x, *given), strict=True)]
    more = [value(name, biases[name]) if name in biases else None for name in BIASES]
    nodes = [node("Q4NXMoE", [*inputs, None, None, *more], **SIZES, **scales)]
    constants = [*inputs[1:], *(one for one in more if one is not None)]
    model = model_of(nodes, inputs[:1], dict(zip(constants, [*given, *biases.values()], strict=True)))
    (y,) = run(with_functions(model), {"X": x})
    # As above; biases and beta at most double the numbers that are summed.
    expected = q4nx_moe.reference(x, *given, **SIZES, **biases, **scales)
    np.testing.assert_allclose(y, expected, rtol=0, atol=8 * (HIDDEN + INNER) * 2.0**-24)


@pytest.mark.parametrize(
    ("inputs", "attributes", "message"),
    [
        ((None, "logits"), {}, "expected a router beside logits_bias .*, got router_logits"),
        (("router", None), SCALES | {"gating": "geglu"}, "expected gating of swiglu beside its constants"),
    ],
)
def test_biases_and_scales_that_do_not_fit_are_refused(
    inputs: tuple[str | None, ...], attributes: dict[str, Any], message: str
) -> None:
    router, gate_up, down = weights()
    arrays = {"router": router, "logits": np.zeros((1, EXPERTS), np.float32)}
    first, logits = (value(name, arrays[name]) if name else None for name in inputs)
    x, blocks, outer = (
        value(name, array)
        for name, array in (("X", np.zeros((1, HIDDEN), np.float32)), ("gate_up", gate_up), ("down", down))
    )
    bias = value("logits_bias", np.zeros(EXPERTS, np.float32))
    listed = [x, first, blocks, outer, logits, None, None, None, bias]
    model = model_of([node("Q4NXMoE", listed, **SIZES, **attributes)], [one for one in listed if one is not None])
    with pytest.raises(ValueError, match=message):
        with_functions(model)


def test_biased_choice_without_normalised_weights_is_refused() -> None:
    x = np.zeros((1, HIDDEN), np.float32)
    with pytest.raises(ValueError, match="expected normalize_routing_weights of 1 beside a router_bias"):
        compute(x, weights(), BIAS, normalize_routing_weights=0)


@pytest.mark.parametrize("leading", [(2, 3), (4,)])
@pytest.mark.parametrize("normalize", [0, 1])
def test_given_router_logits_equal_reference(leading: tuple[int, ...], normalize: int) -> None:
    rng = np.random.default_rng(1)
    x, logits = (rng.standard_normal((*leading, size), dtype=np.float32) for size in (HIDDEN, EXPERTS))
    _, *given = weights()
    attributes = SIZES | {"normalize_routing_weights": normalize}
    rows, ranks = value("X", x), value("router_logits", logits)
    constants = [value(name, array) for name, array in zip(NAMES[1:], given, strict=True)]
    nodes = [node("Q4NXMoE", [rows, None, *constants, ranks], **attributes)]
    model = model_of(nodes, [rows, ranks], dict(zip(constants, given, strict=True)))
    (y,) = run(with_functions(model), {"X": x, "router_logits": logits})
    expected = q4nx_moe.reference(x, None, *given, logits, **attributes)
    np.testing.assert_allclose(y, expected, rtol=0, atol=4 * (HIDDEN + INNER) * 2.0**-24)  # as above


@pytest.mark.parametrize(
    ("inputs", "got"), [(("X", None, "gate_up", "down"), "none"), ((*"X", *NAMES, "router_logits"), "both")]
)
def test_router_and_logits_both_or_neither_are_refused(inputs: tuple[str | None, ...], got: str) -> None:
    arrays = dict(
        zip(
            ("X", *NAMES, "router_logits"),
            (np.zeros((1, HIDDEN), np.float32), *weights(), np.zeros((1, EXPERTS), np.float32)),
            strict=True,
        )
    )
    values = {name: value(name, arrays[name]) for name in inputs if name}
    nodes = [node("Q4NXMoE", [values[name] if name else None for name in inputs], **SIZES)]
    with pytest.raises(ValueError, match=f"expected an input router, or router_logits, .*, got {got}"):
        with_functions(model_of(nodes, [*values.values()]))


def test_layouts_and_types_of_weights_are_same_numbers() -> None:
    x = np.random.default_rng(1).standard_normal((3, HIDDEN), dtype=np.float32)
    narrow, wide = weights(), weights(q4nx.WIDE)
    router = narrow[0].astype(ml_dtypes.bfloat16)
    expected = compute(x, [router.astype(np.float32), *narrow[1:]])
    np.testing.assert_array_equal(compute(x, [router, *wide[1:]]), expected)


def test_equal_logits_choose_lower_expert() -> None:
    router, gate_up, down = weights()
    router[:] = router[0]
    x = np.random.default_rng(1).standard_normal((3, HIDDEN), dtype=np.float32)
    others = np.split(down.copy(), EXPERTS)
    for blocks in others[TAKEN:]:
        blocks[:] = 0xFF  # not a number
    y = compute(x, [router, gate_up, np.concatenate(others)])
    np.testing.assert_array_equal(y, compute(x, [router, gate_up, down]))
    assert np.isfinite(y).all()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"experts_per_token": EXPERTS + 1}, "expected experts_per_token to be at most num_experts, 6, got 7"),
        ({"experts_per_token": 0}, "expected experts_per_token of at least 1"),
        ({"gating": "relu"}, "expected gating to be one of swiglu, geglu"),
        ({"normalize_routing_weights": 2}, "expected normalize_routing_weights to be 0 or 1"),
        ({"top_k": 2}, "expected the attributes num_experts"),
    ],
)
def test_malformed_nodes_are_refused(wrong: dict[str, Any], message: str) -> None:
    x = np.zeros((1, HIDDEN), np.float32)
    given = weights()
    values = [value(name, array) for name, array in zip(("X", *NAMES), (x, *given), strict=True)]
    model = model_of([node("Q4NXMoE", [*values], **{**SIZES, **wrong})], values)
    with pytest.raises(ValueError, match=message):
        with_functions(model)
