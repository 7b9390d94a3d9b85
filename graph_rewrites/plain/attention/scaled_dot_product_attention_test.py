# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from flownpu.graph_rewrites import testing
from flownpu.graph_rewrites.plain.attention.scaled_dot_product_attention import fold_attention
from flownpu.graph_rewrites.report import AttentionGeometry, FoldedAttention
from flownpu.ops.contracts import input_position

# Queries, keys and values [B, S, heads d] become [B, heads, S, d]; `k_last` is [B, heads, d, S].
MODEL = """
attention (float[B, S, {width}] q, float[B, {keys}, {kv_width}] k, float[B, {keys}, {kv_width}] v,
           float[B, 1, S, S] bias, bool[B, 1, S, S] seen, float fed) => (float y{also}) {{
    by_head = Constant <value_ints = [0, 0, {heads}, {size}]> ()
    kv_by_head = Constant <value_ints = [0, 0, {kv_heads}, {size}]> ()
    joined = Constant <value_ints = [0, 0, {width}]> ()
    quarter = Constant <value = float {{0.25}}> ()
    half = Constant <value = float {{0.5}}> ()
    four = Constant <value = float {{4.0}}> ()
    cap = Constant <value = float {{3.0}}> ()
    zero = Constant <value = float {{0.0}}> ()
    minus_one = Constant <value = float {{-1.0}}> ()
    minus_infinity = Constant <value = float {{-inf}}> ()
    lowest = Constant <value = float {{-3.4028235e38}}> ()
    q4 = Reshape (q, by_head)
    k4 = Reshape (k, kv_by_head)
    v4 = Reshape (v, kv_by_head)
    qt = Transpose <perm = [0, 2, 1, 3]> (q4)
    vt = Transpose <perm = [0, 2, 1, 3]> (v4)
    {k}
    product = MatMul ({operands})
    {scores}
    p = Softmax <axis = {axis}> (s)
    {guard}
    o = MatMul ({weights}, {values})
    {output}
}}
"""
DEFAULTS = {
    "keys": "S",
    "also": "",
    "operands": "qt, k_last",
    "k": "k_last = Transpose <perm = [0, 2, 3, 1]> (k4)",
    "scores": "s = Mul (product, quarter)",
    "axis": "-1",
    "guard": "",
    "weights": "p",
    "values": "vt",
    "output": "ot = Transpose <perm = [0, 2, 1, 3]> (o) y = Reshape (ot, joined)",
}
# KV heads as torch's exporter repeats them: sizes are computed, and 1 stands for each -1 of torch's expand.
EXPAND = """
    {x}_apart = Unsqueeze ({x}t, axis_2)
    {x}_spread = Expand ({x}_apart, repeats)
    {x}_size = Shape <start = 0, end = 1> ({x}t)
    {x}_length = Shape <start = 2, end = 3> ({x}t)
    {x}_shape = Concat <axis = 0> ({x}_size, all_heads, {x}_length, head_size)
    {x}_all = Reshape ({x}_spread, {x}_shape)
"""
GROUPED = (
    """
    axis_2 = Constant <value_ints = [2]> ()
    repeats = Constant <value_ints = [1, 1, {repeats}, 1, 1]> ()
    all_heads = Constant <value_ints = [{heads}]> ()
    head_size = Constant <value_ints = [{size}]> ()
    kt = Transpose <perm = [0, 2, 1, 3]> (k4)
    """
    + EXPAND.replace("{x}", "k")
    + EXPAND.replace("{x}", "v")
    + "k_last = Transpose <perm = [0, 1, 3, 2]> (k_all)"
)


def _model(changed: dict[str, str] | None = None, heads: int = 3, kv_heads: int | None = None, size: int = 16) -> Any:
    kv_heads = kv_heads or heads
    sizes = {
        "heads": heads, "kv_heads": kv_heads, "size": size, "width": heads * size, "kv_width": kv_heads * size,
        "repeats": heads // kv_heads,
    }  # fmt: skip
    parts = DEFAULTS | ({"k": GROUPED, "values": "v_all"} if 1 < kv_heads < heads else {}) | (changed or {})
    text = MODEL.format(**sizes, **{name: part.format(**sizes) for name, part in parts.items()})
    return testing.parse(text.replace("{{", "{").replace("}}", "}"))


def _feeds(model: Any, tokens: int = 5) -> dict[str, testing.Array]:
    generator = np.random.default_rng(7)
    visible = np.tril(np.ones((2, 1, tokens, tokens), bool))
    visible[0, :, :, :2] = False  # padding on the left: its rows see nothing
    made: dict[str, testing.Array] = {
        "bias": generator.standard_normal((2, 1, tokens, tokens)),
        "seen": visible,
        "fed": np.ones(1).reshape([]),
    }
    widths = {value.name: value.shape[-1] for value in model.graph.inputs[:3]}
    made |= {name: generator.standard_normal((2, tokens, width)) for name, width in widths.items()}
    return {name: array if array.dtype == bool else array.astype(np.float32) for name, array in made.items()}


def _fold(original: Any) -> tuple[Any, list[Any], list[FoldedAttention]]:
    found: list[FoldedAttention] = []

    def rule(model: Any) -> tuple[int, list[Any]]:
        count, misses, folded = fold_attention(model, lambda geometry: (3, f"{geometry.kind}, all of it"))
        found.extend(folded)
        return count, misses

    model, misses = testing.folded(original, rule)
    return model, misses, found


def _check_same(original: Any, **attributes: Any) -> Any:
    """Folds, compares the numbers, and returns the operator."""
    model, misses, folded = _fold(original)
    assert misses == []
    assert len(folded) == 1
    assert "Softmax" not in testing.operator_names(model)
    (node,) = (node for node in model.graph if node.op_type == "FlowQKVAttention")
    for name, expected in attributes.items():
        assert node.attributes[name].value == pytest.approx(expected), name
    feeds = _feeds(original)
    expected_output, found = (testing.run(m, feeds)[0] for m in (original, model))
    assert found.shape == expected_output.shape
    largest = testing.largest(feeds["q"], feeds["k"], feeds["v"])
    scale = node.attributes["scale"].as_float()
    bound = testing.attention_bound(
        largest, largest, head_size=node.attributes["head_size"].as_int(), scale=scale, total=5
    )
    valid = ~np.isnan(expected_output)  # rows without visible keys are NaN in a graph without a guard
    assert valid.any()
    assert np.max(np.abs(found - expected_output)[valid]) <= bound
    assert np.isfinite(found).all()
    testing.check(model)
    return node


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "kind"),
    [(3, 3, 16, "MHA"), (4, 2, 16, "GQA"), (6, 2, 8, "GQA"), (4, 1, 32, "MQA"), (1, 1, 24, "MHA"), (5, 5, 40, "MHA")],
)
def test_any_head_counts_fold(heads: int, kv_heads: int, size: int, kind: str) -> None:
    original = _model(None, heads, kv_heads, size)
    _check_same(original, num_heads=heads, kv_num_heads=kv_heads, head_size=size, scale=0.25, causal=0)
    _, _, (folded,) = _fold(original)
    assert folded.level == 3
    assert folded.reason == f"{kind}, all of it"
    geometry = {"heads": heads, "kv_heads": kv_heads, "head_size": size, "tokens": None, "cached": False}
    assert folded.geometry == AttentionGeometry(**geometry, causal=False, window=-1, biased=False)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "forms",
    [
        {"k": "kt = Transpose <perm = [0, 2, 1, 3]> (k4) k_last = Transpose <perm = [0, 1, 3, 2]> (kt)"},
        {"k": "kt = Transpose <perm = [2, 0, 1, 3]> (k4) k_last = Transpose <perm = [1, 0, 3, 2]> (kt)"},
        # The graph goes on with heads, and with heads in another order.
        {"output": "y = Identity (o)"},
        {"output": "y = Transpose <perm = [1, 0, 2, 3]> (o)"},
    ],
)
def test_transposes_at_any_place_are_folded(forms: dict[str, str]) -> None:
    _check_same(_model(forms), scale=0.25)


def test_operand_whose_reshape_is_hidden_is_reshaped() -> None:
    node = _check_same(_model({"k": "kt = Identity (k4) k_last = Transpose <perm = [0, 2, 3, 1]> (kt)"}))
    # Behind the Identity the heads' Reshape is not found, so the operand is reshaped to [B, S, heads d] again.
    assert node.inputs[1].producer().op_type == "Reshape"


BOTH_SCALED = """
    kh = Mul (k4, half) k_last = Transpose <perm = [0, 2, 3, 1]> (kh) qh = Mul (half, qt)
"""


@pytest.mark.parametrize(
    ("forms", "scale"),
    [
        ({"scores": "s = Div (product, four)"}, 0.25),
        ({"scores": "a = Mul (product, half) s = Div (a, four)"}, 0.125),
        ({"scores": "s = Mul (product, half)", "k": BOTH_SCALED, "operands": "qh, k_last"}, 0.125),
        # The same number for all scores, which does not change softmax.
        ({"scores": "a = Mul (product, half) s = Add (a, four)"}, 0.5),
    ],
)
def test_scale_of_scores_and_operands_is_folded(forms: dict[str, str], scale: float) -> None:
    _check_same(_model(forms), scale=scale)


def test_soft_cap_is_folded() -> None:
    scores = "a = Mul (product, half) b = Div (a, cap) c = Tanh (b) s = Mul (c, cap)"
    _check_same(_model({"scores": scores}), scale=0.5, softcap=3.0)


@pytest.mark.parametrize(
    "scores",
    [
        "a = Mul (product, quarter) s = Add (a, bias)",
        "a = Mul (product, quarter) b = Add (bias, a) s = Add (b, bias)",
        "a = Mul (product, quarter) s = Where (seen, a, lowest)",
        "a = Mul (product, quarter) hidden = Not (seen) s = Where (hidden, minus_infinity, a)",
        "a = Mul (product, quarter) m = Where (seen, zero, minus_infinity) s = Add (a, m)",
        "a = Mul (product, quarter) m = Where (seen, zero, lowest) c = Add (a, m) s = Add (c, bias)",
    ],
)
@pytest.mark.parametrize("guarded", [False, True])
def test_masks_and_biases_are_folded(scores: str, guarded: bool) -> None:
    guard = {"guard": "no = IsNaN (p) pw = Where (no, zero, p)", "weights": "pw"} if guarded else {}
    original = _model({"scores": scores, **guard}, 4, 2)
    model, misses, (folded,) = _fold(original)
    assert misses == []
    assert folded.geometry.biased
    feeds = _feeds(original)
    expected, found = (testing.run(m, feeds)[0] for m in (original, model))
    sees = np.broadcast_to(np.asarray(feeds["seen"][:, 0].any(axis=-1, keepdims=True)), found.shape)
    rows = sees if "seen" in scores else np.ones_like(sees)
    largest = testing.largest(*(feeds[name] for name in ("q", "k", "v"))) + testing.largest(feeds["bias"])
    bound = testing.attention_bound(largest, largest, head_size=16, scale=0.25, total=5)
    assert np.max(np.abs(found - expected)[rows]) <= bound
    assert np.isfinite(found).all()  # also rows without visible keys: the next layer computes keys and values from them


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"axis": "1"}, "the softmax is over axis 1, expected the last one, the keys"),
        ({"also": ", float p"}, "1 nodes read the probabilities, or they are an output"),
        (
            {"guard": "pw = Relu (p)", "weights": "pw"},
            "the probabilities are read by Relu, expected MatMul(probabilities, values)",
        ),
        (
            {"guard": "no = IsNaN (p) pw = Where (no, quarter, p)", "weights": "pw"},
            "the probabilities go through a Where that is not Where(IsNaN(p), 0, p)",
        ),
        ({"scores": "s = Mul (product, fed)"}, "the scores are changed by Mul with something computed"),
        ({"scores": "s = Relu (product)"}, "the softmax is of Relu, expected scores of a MatMul"),
        (
            {"scores": "a = Add (product, bias) s = Mul (a, half)"},
            "a mask or bias is added before the scores are scaled",
        ),
        (
            {"scores": "b = Div (product, cap) c = Tanh (b) d = Mul (c, cap) s = Mul (d, half)"},
            "the scores are scaled after their soft cap",
        ),
        ({"scores": "c = Tanh (product) s = Mul (c, minus_one)"}, "the soft cap is -1.0, expected a positive number"),
        ({"scores": "s = Where (seen, product, minus_one)"}, "masked scores are -1.0, expected what weighs nothing"),
        ({"scores": "s = Where (seen, product, bias)"}, "both sides of the scores' Where are computed"),
        ({"keys": "T"}, "S queries and T new keys: FlowQKVAttention has a key for each of its queries"),
    ],
)
def test_unmatched_graph_reports_miss(changed: dict[str, str], reason: str) -> None:
    model, misses, folded = _fold(_model(changed))
    assert folded == []
    assert "Softmax" in testing.operator_names(model)
    assert [(miss.rule, miss.reason[: len(reason)]) for miss in misses] == [("scaled_dot_product_attention", reason)]


@pytest.mark.parametrize(
    ("graph", "reason"),
    [
        (
            """attention (float[B, S, 16] q, float[B, 16, S] k, float[B, S, 16] v) => (float y) {
                product = MatMul (q, k) p = Softmax (product) y = MatMul (p, v) }""",
            "v has the shape [B,S,16], expected four axes: batch, head, token, element",
        ),
        (
            """attention (float[B, H, S, 16] q, float[B, H, 16, S] k, float[B, H, S, 16] v) => (float y) {
                product = MatMul (q, k) p = Softmax (product) y = MatMul (p, v) }""",
            "v has H heads of 16, expected numbers that the graph says",
        ),
        (
            """attention (float[B, 2, S, 16] q, float[B, 2, 16, S] k, float[B, 2, S, 8] v) => (float y) {
                product = MatMul (q, k) p = Softmax (product) y = MatMul (p, v) }""",
            "heads of 16, 16 and 8 numbers, expected as many in Q, K and V",
        ),
        (
            """attention (float[B, 2, S, 16] q, float[B, 1, 16, S] k, float[B, 2, S, 16] v) => (float y) {
                product = MatMul (q, k) p = Softmax (product) y = MatMul (p, v) }""",
            "1 heads of K and 2 of V, expected as many",
        ),
        (
            """attention (float[B, 4, S, 16] q, float[B, 3, 16, S] k, float[B, 3, S, 16] v) => (float y) {
                product = MatMul (q, k) p = Softmax (product) y = MatMul (p, v) }""",
            "4 query heads and 3 KV heads each 1 times, expected as many",
        ),
        (
            """attention (float[B, 2, S, 16] qt, float[B, 6, 16, S] k, float[B, 6, S, 16] v) => (float y) {
                axis_2 = Constant <value_ints = [2]> () repeats = Constant <value_ints = [1, 1, 3, 1, 1]> ()
                all_heads = Constant <value_ints = [6]> () head_size = Constant <value_ints = [16]> ()"""
            + EXPAND.replace("{x}", "q")
            + "product = MatMul (q_all, k) p = Softmax (product) y = MatMul (p, v) }",
            "the queries' heads are expanded",
        ),
        (
            """attention (float[B, 2, S, 16] q, float[B, 2, S, 16] k, float[B, 2, P, 16] past, float[B, 2, T, 16] v)
                => (float y) {
                whole = Concat <axis = 2> (past, k) k_last = Transpose <perm = [0, 1, 3, 2]> (whole)
                product = MatMul (q, k_last) p = Softmax (product) y = MatMul (p, v) }""",
            "only one of K and V has a KV cache",
        ),
        (
            """attention (float[B, 3, S, 16] q, float[B, 3, 5, 16] v) => (float y) {
                product = MatMul (q, table) p = Softmax (product) y = MatMul (p, v) }""",
            "the scores are the product with a constant: a projection, not an attention",
        ),
    ],
)
def test_unfit_shapes_report_miss(graph: str, reason: str) -> None:
    _, misses, folded = _fold(testing.parse(graph, table=np.ones((1, 3, 16, 5), np.float32)))
    assert folded == []
    assert [miss.reason[: len(reason)] for miss in misses] == [reason]


def test_broadcast_head_folds_as_mqa() -> None:
    original = testing.parse(
        """attention (float[B, 4, S, 16] q, float[B, 1, 16, S] k, float[B, 1, S, 16] v) => (float y) {
            product = MatMul (q, k) p = Softmax (product) y = MatMul (p, v) }"""
    )
    model, misses, (folded,) = _fold(original)
    assert misses == []
    assert folded.geometry.kind == "MQA"
    generator = np.random.default_rng(1)
    shapes = {"q": (2, 4, 7, 16), "k": (2, 1, 16, 7), "v": (2, 1, 7, 16)}
    feeds = {name: 0.5 * generator.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    found, expected = (testing.run(m, feeds)[0] for m in (model, original))
    bound = testing.attention_bound(testing.largest(*feeds.values()), 3, head_size=16, scale=1.0, total=7)
    assert np.max(np.abs(found - expected)) <= bound


# A cache of P positions, and a mask made of positions as exporters write it: keys count from 0, queries from P.
CACHED = """
attention (float[B, S, 64] q, float[B, S, 64] k, float[B, S, 64] v, float[B, 4, P, 16] past_key,
           float[B, 4, P, 16] past_value, bool[B, 1, 1, T] padding)
    => (float y, float[B, 4, T, 16] present_key, float[B, 4, T, 16] present_value) {{
    by_head = Constant <value_ints = [0, 0, 4, 16]> ()
    quarter = Constant <value = float {{{{0.25}}}}> ()
    zero = Constant <value = float {{{{0.0}}}}> ()
    minus_infinity = Constant <value = float {{{{-inf}}}}> ()
    window = Constant <value = int64 {{{{3}}}}> ()
    first = Constant <value = int64 {{{{0}}}}> ()
    step = Constant <value = int64 {{{{1}}}}> ()
    two = Constant <value = int64 {{{{2}}}}> ()
    query_axes = Constant <value_ints = [0, 1, 3]> ()
    key_axes = Constant <value_ints = [0, 1, 2]> ()
    past_shape = Shape (past_key)
    before = Gather (past_shape, two)
    new_shape = Shape (q)
    new = Gather (new_shape, step)
    total = Add (before, new)
    query_range = Range ({start}, {end}, step)
    key_range = Range (first, total, step)
    query_index = Unsqueeze (query_range, query_axes)
    key_index = Unsqueeze (key_range, key_axes)
    {mask}
    q4 = Reshape (q, by_head)
    k4 = Reshape (k, by_head)
    v4 = Reshape (v, by_head)
    qt = Transpose <perm = [0, 2, 1, 3]> (q4)
    kt = Transpose <perm = [0, 2, 1, 3]> (k4)
    vt = Transpose <perm = [0, 2, 1, 3]> (v4)
    present_key = Concat <axis = 2> (past_key, kt)
    present_value = Concat <axis = -2> (past_value, vt)
    k_last = Transpose <perm = [0, 1, 3, 2]> (present_key)
    product = MatMul (qt, k_last)
    scaled = Mul (product, quarter)
    addend = Where (seen, zero, minus_infinity)
    s = Add (scaled, addend)
    p = Softmax (s)
    o = MatMul (p, present_value)
    y = Transpose <perm = [0, 2, 1, 3]> (o)
}}
"""
TURN = "Transpose <perm = [0, 2, 1, 3]>"
CAUSAL = "causal = LessOrEqual (key_index, query_index)"


@pytest.mark.parametrize(
    ("mask", "causal", "window"),
    [
        (f"{CAUSAL} seen = And (causal, padding)", 1, -1),
        ("causal = GreaterOrEqual (query_index, key_index) seen = And (padding, causal)", 1, -1),
        (
            f"{CAUSAL} oldest = Sub (query_index, window) near = Greater (key_index, oldest) "
            "both = And (near, causal) seen = And (both, padding)",
            1,
            3,
        ),
        # Not proven causal: a window alone, keys that are compared strictly, no comparison of positions at all.
        ("oldest = Sub (query_index, window) near = Greater (key_index, oldest) seen = And (near, padding)", 0, -1),
        ("causal = Less (key_index, query_index) seen = Or (causal, padding)", 0, -1),
        ("seen = And (padding, padding)", 0, -1),
        # Keys are compared with keys, not with queries; and a Slice has moved the comparison by one key.
        ("causal = LessOrEqual (key_index, key_index) seen = And (causal, padding)", 0, -1),
        (
            "longer = Add (total, step) long_range = Range (first, longer, step) "
            "long_index = Unsqueeze (long_range, key_axes) causal = LessOrEqual (long_index, query_index) "
            "one = Constant <value_ints = [1]> () ends = Constant <value_ints = [9223372036854775807]> () "
            "axis = Constant <value_ints = [3]> () moved = Slice (causal, one, ends, axis) "
            "seen = And (moved, padding)",
            0,
            -1,
        ),
    ],
)
@pytest.mark.parametrize("past", [0, 4])
def test_mask_over_cached_keys_is_folded(mask: str, causal: int, window: int, past: int) -> None:
    original = testing.parse(
        CACHED.format(mask=mask, start="before", end="total").replace("{{", "{").replace("}}", "}")
    )
    model, misses, (folded,) = _fold(original)
    assert misses == []
    assert (folded.geometry.cached, folded.geometry.causal, folded.geometry.window) == (True, bool(causal), window)
    (node,) = (node for node in model.graph if node.op_type == "FlowQKVAttention")
    assert node.attributes["causal"].as_int() == causal
    assert "Concat" not in [
        n.op_type for n in model.graph if any(v is not None and v.name == "past_key" for v in n.inputs)
    ]
    generator = np.random.default_rng(5)
    feeds = {name: generator.standard_normal((1, 3, 64), np.float32) for name in ("q", "k", "v")}
    feeds |= {name: generator.standard_normal((1, 4, past, 16), np.float32) for name in ("past_key", "past_value")}
    feeds["padding"] = np.ones((1, 1, 1, past + 3), bool)
    found, expected = (testing.run(m, feeds) for m in (model, original))
    valid = ~np.isnan(expected[0])
    largest = testing.largest(*(array for name, array in feeds.items() if name != "padding"))
    bound = testing.attention_bound(largest, largest, head_size=16, scale=0.25, total=past + 3)
    assert np.max(np.abs(found[0] - expected[0])[valid]) <= bound
    for ours, theirs in zip(found[1:], expected[1:], strict=True):
        np.testing.assert_array_equal(ours, theirs)
    testing.check(model)


def test_mask_with_shifted_begin_is_not_causal() -> None:
    text = CACHED.format(mask=f"{CAUSAL} seen = And (causal, padding)", start="first", end="new")
    _, _, (folded,) = _fold(testing.parse(text.replace("{{", "{").replace("}}", "}")))
    assert not folded.geometry.causal


WHOLE = "{x}t = com.microsoft.RotaryEmbedding ({x}u, positions, cos, sin)"
# The first 6 of 16 elements of a head are rotated.
PART = """
    {x}_turns = Slice ({x}u, zeros, six, last_axis) {x}_stays = Slice ({x}u, six, sixteen, last_axis)
    {x}_turned = com.microsoft.RotaryEmbedding ({x}_turns, positions, cos, sin)
    {x}t = Concat <axis = -1> ({x}_turned, {x}_stays)
"""


@pytest.mark.parametrize(
    ("positions", "counted", "rotation"),
    [("query_range", True, WHOLE), ("from_zero", False, WHOLE), ("from_zero", False, PART)],
)
def test_rotation_is_folded_and_counted_positions_need_no_input(positions: str, counted: bool, rotation: str) -> None:
    text = CACHED.format(mask=f"{CAUSAL} seen = And (causal, padding)", start="before", end="total")
    for side in "qk":
        rotated = rotation.replace("{x}", side)
        text = text.replace(f"{side}t = {TURN} ({side}4)", f"{side}u = {TURN} ({side}4) {rotated}")
    made = f"""
        from_zero = Range (first, new, step)
        front = Constant <value_ints = [0]> ()
        row = Unsqueeze ({positions}, front)
        batch = Shape <start = 0, end = 1> (q)
        one = Constant <value_ints = [1]> ()
        rows = Concat <axis = 0> (batch, one)
        positions = Expand (row, rows)
        zeros = Constant <value_ints = [0]> ()
        six = Constant <value_ints = [6]> ()
        sixteen = Constant <value_ints = [16]> ()
        last_axis = Constant <value_ints = [3]> ()
        q4 ="""
    text = text.replace("q4 =", made).replace("{{", "{").replace("}}", "}")
    angles = np.arange(16)[:, None] / (1 + np.arange(8 if rotation == WHOLE else 3))
    tables = {"cos": np.cos(angles).astype(np.float32), "sin": np.sin(angles).astype(np.float32)}
    original = testing.parse(text, **tables)
    model, misses, _ = _fold(original)
    assert misses == []
    (node,) = (node for node in model.graph if node.op_type == "FlowQKVAttention")
    assert node.attributes["do_rotary"].as_int() == 1
    position_ids = node.inputs[input_position("FlowQKVAttention", "position_ids")]
    assert (position_ids is None) == counted
    past, generator = 4, np.random.default_rng(6)
    feeds = {name: generator.standard_normal((1, 3, 64), np.float32) for name in ("q", "k", "v")}
    feeds |= {name: generator.standard_normal((1, 4, past, 16), np.float32) for name in ("past_key", "past_value")}
    feeds["padding"] = np.ones((1, 1, 1, past + 3), bool)
    found, expected = (testing.run(m, feeds)[0] for m in (model, original))
    largest = testing.largest(*(array for name, array in feeds.items() if name != "padding"))
    bound = testing.attention_bound(largest, largest, head_size=16, scale=0.25, total=past + 3)
    assert np.max(np.abs(found - expected)) <= bound
