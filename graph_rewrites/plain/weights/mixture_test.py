# SPDX-License-Identifier: Apache-2.0
import re
from typing import Any

import numpy as np
import pytest

from flownpu.graph_rewrites import testing
from flownpu.graph_rewrites.plain.weights.mixture import fold_mixture
from flownpu.ops import q4nx
from flownpu.ops.definitions import q4nx_moe

EXPERTS, K, D, INNER = 3, 2, 48, 40
MODEL = """
mixture (float[N, 48] x, float fed) => (float[N, 48] y) {{
    one = Constant <value_ints = [1]> ()
    ones = Constant <value_ints = [1, 1]> ()
    first_axis = Constant <value_ints = [0]> ()
    last_axis = Constant <value_ints = [-1]> ()
    row_shape = Constant <value_ints = [-1, 48]> ()
    k = Constant <value_ints = [2]> ()
    k_scalar = Constant <value_int = 2> ()
    depth = Constant <value_int = 3> ()
    values = Constant <value_ints = [0, 1]> ()
    logits = MatMul (x, router)
    probabilities = {softmax} (logits)
    weights, chosen = TopK <axis = -1, largest = {largest}, sorted = 1> (probabilities, k)
    total = ReduceSum <keepdims = 1> (weights, last_axis)
    routing = {routing}
    one_hot = OneHot <axis = -1> (chosen, depth, values)
    mask = Transpose <perm = {perm}> (one_hot)
    shape = Shape (x)
    sum = ConstantOfShape <value = float[1] {{{start}}}> (shape)
    x_once = Unsqueeze (x, first_axis)
    flat = Flatten <axis = 2> (routing)
    {experts}
    y = Identity (sum{last})
}}
"""
EXPERT = """
    number{e} = Constant <value_int = {number}> ()
    of{e} = Gather <axis = 0> (mask, number{e})
    is{e} = Cast <to = 9> (of{e})
    places{e} = NonZero (is{e})
    columns{e} = Transpose <perm = [1, 0]> (places{e})
    rank_column{e}, row_column{e} = Split <axis = 1> (columns{e}, ones)
    ranks{e} = Squeeze (rank_column{e}, one)
    rows{e} = Squeeze (row_column{e}, one)
    taken{e} = Gather <axis = 1> (x_once, {rows}{e})
    current{e} = Reshape (taken{e}, row_shape)
    gate{e} = MatMul (current{e}, gate_weight{e})
    sigmoid{e} = {activation} (gate{e})
    act{e} = Mul (gate{e}, sigmoid{e})
    up{e} = MatMul (current{e}, up_weight{e})
    product{e} = Mul (act{e}, up{e})
    made{e} = MatMul (product{e}, down_weight{e})
    scaled{e} = Mul (rows{e}, k_scalar)
    place{e} = Add (ranks{e}, scaled{e})
    weight{e} = Gather <axis = 0> (flat, place{e})
    weighted{e} = Mul (made{e}, weight{e})
    row_index{e} = Unsqueeze (rows{e}, one)
    size{e} = Shape (weighted{e})
    index{e} = Expand (row_index{e}, size{e})
    {addition}
"""
ADDITION = 'sum{e} = ScatterElements <axis = 0, reduction = "{reduction}"> (sum{before}, index{e}, weighted{e})'
# The addition in opsets before 16, whose ScatterElements cannot add.
OLD_ADDITION = """
    zeros{e} = ConstantOfShape <value = float[1] {{0.0}}> (shape)
    alone{e} = ScatterElements <axis = 0> (zeros{e}, index{e}, weighted{e})
    sum{e} = Add (sum{before}, alone{e})
"""
DEFAULTS: dict[str, Any] = {
    "softmax": "Softmax <axis = 1>",
    "largest": 1,
    "routing": "Div (weights, total)",
    "perm": "[2, 1, 0]",
    "start": "0.0",
    "rows": "rows",
    "activation": "Sigmoid",
    "reduction": "add",
    "numbers": (0, 1, 2),
    "addition": ADDITION,
}


def _weights() -> dict[str, testing.Array]:
    rng = np.random.default_rng(4)
    sizes = {"gate_weight": (D, INNER), "up_weight": (D, INNER), "down_weight": (INNER, D)}
    found = {"router": rng.standard_normal((D, EXPERTS)).astype(np.float32)}
    for expert in range(EXPERTS):
        for name, shape in sizes.items():
            found[f"{name}{expert}"] = (rng.standard_normal(shape) / shape[0] ** 0.5).astype(np.float32)
    return found


WEIGHTS = _weights()


def _model(**changed: Any) -> Any:
    given = DEFAULTS | changed
    numbers, addition = given.pop("numbers"), given.pop("addition")
    experts = ""
    for e, number in enumerate(numbers):
        names = {"e": e, "before": e - 1 if e else "", "number": number, **given}
        experts += EXPERT.format(addition=addition.format(**names), **names)
    return testing.parse(MODEL.format(experts=experts, last=len(numbers) - 1, **given), **WEIGHTS)


@pytest.mark.parametrize("normalized", [True, False])
@pytest.mark.parametrize("addition", [ADDITION, OLD_ADDITION], ids=["one that adds", "of an old opset"])
@pytest.mark.parametrize("numbers", [(0, 1, 2), (2, 0, 1)])
def test_experts_become_one_operator(numbers: tuple[int, ...], addition: str, normalized: bool) -> None:
    routing = "Div (weights, total)" if normalized else "Identity (weights)"
    original = _model(numbers=numbers, addition=addition, routing=routing)
    model, misses = testing.folded(original, fold_mixture)
    assert testing.operator_names(model) == ["Q4NXMoE", "Identity"]
    assert misses == []
    x = np.random.default_rng(1).standard_normal((7, D), np.float32)
    (found,) = testing.run(model, {"x": x, "fed": np.zeros((), np.float32)})
    # The i-th expert of the chain has weights i and the number numbers[i]; the operator has experts in their order.
    by_number = np.argsort(numbers)

    def blocks(name: str) -> list[testing.Array]:
        weights = (np.ascontiguousarray(WEIGHTS[f"{name}{e}"].T) for e in by_number)
        return [q4nx.pack(*q4nx.quantize(weight), q4nx.NARROW) for weight in weights]

    pairs = zip(blocks("gate_weight"), blocks("up_weight"), strict=True)
    expected = q4nx_moe.reference(
        x,
        np.ascontiguousarray(WEIGHTS["router"].T),
        np.concatenate([part for pair in pairs for part in pair]),
        np.concatenate(blocks("down_weight")),
        num_experts=EXPERTS,
        experts_per_token=K,
        hidden_size=D,
        expert_size=INNER,
        normalize_routing_weights=int(normalized),
    )
    # Three products of some 50 terms in float32, each off by at most 2^-24 a term; softmax is off by less.
    assert np.abs(found - expected).max() < 4 * D * testing.FLOAT32_ROUNDING * np.abs(expected).max()
    testing.check(model)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"softmax": "LogSoftmax <axis = 1>"}, "is not the softmax of a product with the router"),
        ({"softmax": "Softmax <axis = 0>"}, "is not the softmax of a product with the router"),
        ({"largest": 0}, "TopK chooses the smallest"),
        ({"routing": "Div (weights, fed)"}, "are divided by something else than their sum"),
        ({"routing": "Mul (weights, fed)"}, "are not those that TopK has chosen"),
        ({"perm": "[2, 0, 1]"}, "NonZero does not look for the rows of one expert"),
        ({"start": "1.0"}, "does not begin with zeros"),
        ({"rows": "ranks"}, "does not take the rows that chose it"),
        ({"activation": "Tanh"}, r"is not SiLU\(x . gate\) \* \(x . up\)"),
        ({"reduction": "mul"}, "does not add the rows of one"),
        ({"numbers": (0, 1, 1)}, "expected each of 3 experts once"),
        ({"numbers": (0, 1)}, "expected each of 3 experts once"),
    ],
)
def test_unfit_mixture_is_left_with_reason(changed: dict[str, Any], reason: str) -> None:
    original = _model(**changed)
    model, misses = testing.folded(original, fold_mixture)
    assert "Q4NXMoE" not in testing.operator_names(model)
    miss = misses[-1]
    assert re.search(reason, miss.reason), miss.reason


def test_unrelated_sums_are_no_miss() -> None:
    text = """other (float[N, 48] x, int64[M, 48] index, float[M, 48] more) => (float[N, 48] y) {
        y = ScatterElements <axis = 0, reduction = "add"> (x, index, more)
    }"""
    model, misses = testing.folded(testing.parse(text), fold_mixture)
    assert testing.operator_names(model) == ["ScatterElements"]
    assert misses == []
