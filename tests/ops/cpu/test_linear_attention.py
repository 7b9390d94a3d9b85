# SPDX-License-Identifier: Apache-2.0
"""LinearAttention and the operators around it on the CPU, against their equations in float64.

The equations are those of ONNX's schemas of LinearAttention and CausalConvWithState and of ONNX Runtime's contrib
operators; `test_equations_equal_kernels_of_onnxruntime` holds them against its kernels.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import onnxruntime
import pytest

from tests.one_node import one_node
from tests.ops.device import ISAS, Node, run

RNG = np.random.default_rng(0)
U = 2.0**-24


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape, dtype=np.float32)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x.astype(np.float64)))


def linear_attention(inputs: list[Any], q_num_heads: int, kv_num_heads: int, rule: str, scale: float) -> list[Any]:
    """The recurrence, token by token."""
    query, key, value, state, decay, beta = (None if x is None else x.astype(np.float64) for x in inputs)
    batches, tokens, width = query.shape
    size, heads = width // q_num_heads, max(q_num_heads, kv_num_heads)
    query, key = (x.reshape(batches, tokens, -1, size) for x in (query, key))
    value = value.reshape(batches, tokens, kv_num_heads, -1)
    state = np.zeros((batches, kv_num_heads, size, value.shape[-1])) if state is None else state.copy()
    output = np.zeros((batches, tokens, heads, value.shape[-1]))
    for t in range(tokens):
        k = key[:, t, np.arange(kv_num_heads) * key.shape[2] // kv_num_heads]
        if rule.startswith("gated"):
            state *= np.exp(decay[:, t].reshape(batches, kv_num_heads, -1, 1))
        update = value[:, t]
        if rule.endswith("delta"):
            update = beta[:, t][..., None] * (update - np.einsum("bhij,bhi->bhj", state, k))
        state += k[..., None] * update[:, :, None]
        pick = np.arange(heads)
        queries, states = query[:, t, pick * q_num_heads // heads], state[:, pick * kv_num_heads // heads]
        output[:, t] = scale * np.einsum("bhij,bhi->bhj", states, queries)
    return [output.reshape(batches, tokens, -1), state]


def call(tokens: int, heads: tuple[int, int, int], sizes: tuple[int, int], rule: str, decays: int = 1) -> list[Any]:
    """Random inputs with keys of length 1, as models have them; the heads of queries, keys and values."""
    (hq, hk, hv), (dk, dv) = heads, sizes
    key = normal(2, tokens, hk, dk)
    key /= np.linalg.norm(key, axis=-1, keepdims=True)
    decay = -np.abs(normal(2, tokens, hv * decays)) / 4 if rule.startswith("gated") else None
    beta = sigmoid(normal(2, tokens, hv)).astype(np.float32) if rule.endswith("delta") else None
    key, past = key.reshape(2, tokens, -1), normal(2, hv, dk, dv)
    return [normal(2, tokens, hq * dk), key, normal(2, tokens, hv * dv), past, decay, beta]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("rule", ["linear", "gated", "delta", "gated_delta"])
@pytest.mark.parametrize(
    ("tokens", "heads", "sizes", "decays"),
    [
        (1, (2, 2, 2), (16, 32), 1),
        (3, (2, 2, 4), (32, 72), 1),  # two values a key; a strip that is not whole
        (3, (4, 2, 2), (8, 20), 1),  # two queries a state
        (3, (2, 2, 2), (8, 16), 8),  # a decay for each row
        (150, (2, 2, 4), (32, 48), 1),  # chunks, the last not whole
        (70, (4, 2, 2), (16, 16), 1),
    ],
)
def test_linear_attention_equals_recurrence(
    tokens: int, heads: tuple[int, int, int], sizes: tuple[int, int], decays: int, rule: str, isa: str
) -> None:
    inputs = call(tokens, heads, sizes, rule, decays)
    rules = {"q_num_heads": heads[0], "kv_num_heads": heads[2]}
    expected = linear_attention(inputs, *rules.values(), rule, 0.25)
    attributes = rules | {"update_rule": rule, "scale": 0.25}
    found = run(
        "LinearAttention",
        inputs,
        outputs=("float",) * 2,
        domain="com.microsoft",
        options={"cpu_isa": isa},
        **attributes,
    )
    # A token rounds a state's element some 4 times, and its sums of dk terms as often; without a decay nothing is
    # forgotten, and roundings of all tokens add up. A chunk has as many roundings in another order.
    for ours, theirs in zip(found, expected, strict=True):
        bound = (4 * tokens + sizes[0] + 8) * U * np.abs(theirs).max()
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=bound)


def test_linear_attention_of_parts_equals_whole() -> None:
    inputs = call(100, (2, 2, 2), (16, 16), "gated_delta")
    attributes = {"q_num_heads": 2, "kv_num_heads": 2}

    def attend(begin: int, end: int, state: np.ndarray) -> Any:
        part = [x[:, begin:end] for x in inputs[:3]]
        gates = [x[:, begin:end] for x in inputs[4:]]
        return run(
            "LinearAttention", [*part, state, *gates], outputs=("float",) * 2, domain="com.microsoft", **attributes
        )

    whole = attend(0, 100, inputs[3])
    first, state = attend(0, 60, inputs[3])
    second, state = attend(60, 62, state)
    third, state = attend(62, 100, state)
    bound = 500 * U * np.abs(whole[0]).max()  # as above
    np.testing.assert_allclose(np.concatenate([first, second, third], 1), whole[0], rtol=0, atol=bound)
    np.testing.assert_allclose(state, whole[1], rtol=0, atol=500 * U * np.abs(whole[1]).max())


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
@pytest.mark.parametrize("tokens", [1, 3, 70])
def test_state_of_16_bits_is_rounded_once(tokens: int, dtype: type) -> None:
    inputs = call(tokens, (2, 2, 4), (32, 72), "gated_delta")
    inputs[3] = inputs[3].astype(dtype)
    wide = [*inputs[:3], inputs[3].astype(np.float32), *inputs[4:]]
    heads = {"q_num_heads": 2, "kv_num_heads": 4}
    name = "bfloat16" if dtype is ml_dtypes.bfloat16 else "float16"
    expected = run("LinearAttention", wide, outputs=("float",) * 2, domain="com.microsoft", **heads)
    node = Node("LinearAttention", inputs, outputs=("float", name), domain="com.microsoft", **heads)
    # In memory of its own, then in that of the state before.
    for into in ({}, {1: inputs[3]}):
        output, state = node(*inputs, into=into)
        np.testing.assert_array_equal(output, expected[0])
        np.testing.assert_array_equal(state, expected[1].astype(dtype))


@pytest.mark.parametrize("length", [1, 2, 9, 40])
def test_convolution_in_memory_of_last_state_equals_one_in_its_own(length: int) -> None:
    inputs = [normal(2, length, 8214), normal(8214, 1, 4), None, normal(2, 3, 8214)]
    attributes = {"domain": "com.microsoft", "channels_last": 1, "activation": "silu"}
    node = Node("CausalConvWithState", inputs, outputs=("float",) * 2, **attributes)
    expected = node(*inputs)
    for ours, theirs in zip(node(*inputs, into={1: inputs[3]}), expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def convolution(x: np.ndarray, weight: np.ndarray, bias: Any, past: Any, dilation: int, silu: bool) -> list[np.ndarray]:
    taps, length = weight.shape[2], x.shape[2]
    state = (taps - 1) * dilation
    past = np.zeros((*x.shape[:2], state)) if past is None else past
    whole = np.concatenate([past, x], 2).astype(np.float64)
    y = sum(weight[:, 0, j, None] * whole[:, :, j * dilation : j * dilation + length] for j in range(taps))
    y = y + (0 if bias is None else bias[:, None])
    return [y * sigmoid(y) if silu else y, whole[:, :, whole.shape[2] - state :]]


def by_onnxruntime(op_type: str, inputs: list[Any], **attributes: Any) -> list[np.ndarray]:
    model, feeds = one_node(op_type, inputs, [np.float32] * 2, domain="com.microsoft", attributes=attributes)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return [np.asarray(output) for output in session.run(None, feeds)]


@pytest.mark.parametrize(("heads", "rule"), [((2, 2, 4), "gated_delta"), ((4, 2, 2), "delta"), ((2, 2, 2), "gated")])
def test_equations_equal_kernels_of_onnxruntime(heads: tuple[int, int, int], rule: str) -> None:
    inputs = call(7, heads, (8, 16), rule)
    expected = linear_attention(inputs, heads[0], heads[2], rule, 8**-0.5)
    attributes = {"q_num_heads": heads[0], "kv_num_heads": heads[2], "update_rule": rule}
    for theirs, ours in zip(by_onnxruntime("LinearAttention", inputs, **attributes), expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=50 * U * np.abs(ours).max())
    x, weight, past = normal(2, 6, 5), normal(6, 1, 4), normal(2, 6, 3)
    expected = convolution(x, weight, None, past, 1, True)
    found = by_onnxruntime("CausalConvWithState", [x, weight, None, past], activation="silu")
    x, past = x.swapaxes(1, 2), past.swapaxes(1, 2)
    last = by_onnxruntime("CausalConvWithState", [x, weight, None, past], activation="silu", channels_last=1)
    for theirs, ours in zip([*found, *(y.swapaxes(1, 2) for y in last)], [*expected, *expected], strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=9 * U * 16)


@pytest.mark.parametrize("layout", ["channels first", "tokens first", "tokens first, constant weight"])
@pytest.mark.parametrize("length", [1, 2, 40])
@pytest.mark.parametrize(("taps", "dilation"), [(4, 1), (3, 2), (1, 1)])
@pytest.mark.parametrize("with_past", [False, True])
@pytest.mark.parametrize("activation", ["none", "silu"])
def test_causal_convolution_equals_float64(
    length: int, taps: int, dilation: int, with_past: bool, activation: str, layout: str
) -> None:
    channels = 8214  # two parts of a token, the last not in whole vectors
    x, weight, bias = normal(2, channels, length), normal(channels, 1, taps), normal(channels) if with_past else None
    past = normal(2, channels, (taps - 1) * dilation) if with_past else None
    expected = convolution(x, weight, bias, past, dilation, activation == "silu")
    attributes = {"activation": activation, "dilation": dilation}
    inputs: list[Any] = [x, weight, bias, past]
    if tokens_first := layout != "channels first":
        attributes["channels_last"] = 1
        inputs = [np.ascontiguousarray(x.swapaxes(1, 2)), weight, bias, past]
        inputs[3] = None if past is None else np.ascontiguousarray(past.swapaxes(1, 2))
    constants = (1,) if layout.endswith("constant weight") else ()
    found: list[Any] = run(
        "CausalConvWithState",
        inputs,
        outputs=("float",) * 2,
        domain="com.microsoft",
        constants=constants,
        **attributes,
    )
    found = [y.swapaxes(1, 2) for y in found] if tokens_first else found
    # `taps` + 1 sums; the activation has a slope of at most 1.1, and 3 roundings of its own.
    np.testing.assert_allclose(found[0], expected[0], rtol=0, atol=(taps + 5) * U * 16)
    np.testing.assert_array_equal(found[1], expected[1])


def test_gates_equal_float64() -> None:
    a, b, bias, scale = normal(2, 5, 4), normal(2, 5, 4), normal(4), -np.abs(normal(4))
    a[0, 0] = [50, -50, 0, 100]
    decay, beta = run("LinearAttentionGate", [a, bias, scale, b], outputs=("float",) * 2, domain="com.microsoft")
    # Rounding a + bias, of up to 100, multiplies e^(a + bias) by up to 1 + 100 U.
    np.testing.assert_allclose(decay, scale * np.logaddexp(0, a.astype(np.float64) + bias), rtol=110 * U)
    np.testing.assert_allclose(beta, sigmoid(b), rtol=8 * U)

    x, gate, weight = normal(2, 3, 32), normal(2, 3, 32), normal(8)
    parts = x.astype(np.float64).reshape(2, 3, 4, 8)
    normed = (parts / np.sqrt((parts**2).mean(-1, keepdims=True) + 1e-6) * weight).reshape(x.shape)
    for activation, opened in (("silu", gate * sigmoid(gate)), ("sigmoid", sigmoid(gate))):
        (found,) = run("GatedRMSNorm", [x, weight, gate], domain="com.microsoft", epsilon=1e-6, activation=activation)
        np.testing.assert_allclose(found, normed * opened, rtol=24 * U, atol=24 * U)

    y, row = normal(2, 3, 32), normal(2, 3, 1)
    (found,) = run("GatedAdd", [x, y, row], domain="com.microsoft")
    np.testing.assert_allclose(found, x + row.astype(np.float64) * y, rtol=0, atol=8 * U * 8)

    x = normal(2, 3, 30)  # not in whole fours
    x[0, 0] = 0
    for p in (1, 2):
        (found,) = run("LpNormalization", [x], domain="", p=p)
        norms = np.linalg.norm(x.astype(np.float64), p, -1, keepdims=True)
        np.testing.assert_allclose(found, x / np.where(norms == 0, 1, norms), rtol=4 * U)


@pytest.mark.parametrize("layout", [0, 1])
@pytest.mark.parametrize("by_head", [False, True])
def test_rotation_by_three_positions_equals_float64(layout: int, by_head: bool) -> None:
    heads, d, section = 3, 16, [2, 1, 1]
    half = sum(section)
    x, positions = normal(2, 5, heads, d), RNG.integers(0, 20, (3, 2, 5))
    angles = np.arange(20)[:, None] / 1e4 ** (np.arange(half) / half)
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    axes = [0, 1, 2, 0] if layout else [0, 0, 1, 2]
    c, s = (np.stack([table[positions[axes[j]], j] for j in range(half)], -1)[:, :, None] for table in (cos, sin))
    expected = x.astype(np.float64)
    first, second = x[..., :half], x[..., half : 2 * half]
    expected[..., :half], expected[..., half : 2 * half] = first * c - second * s, second * c + first * s
    given = x.transpose(0, 2, 1, 3).copy() if by_head else x.reshape(2, 5, -1)
    attributes = {"num_heads": heads, "rotary_embedding_dim": 2 * half, "mrope_layout": layout}
    inputs = [given, positions.astype(np.int64), cos, sin]
    (found,) = run("MRotaryEmbedding", inputs, domain="com.microsoft", mrope_section=section, **attributes)
    found = found.transpose(0, 2, 1, 3) if by_head else found.reshape(x.shape)
    np.testing.assert_allclose(found, expected, rtol=0, atol=4 * U * 8)  # 3 roundings of values below 8


@pytest.mark.parametrize(
    ("op_type", "inputs", "attributes", "message"),
    [
        ("LinearAttention", call(2, (2, 2, 2), (8, 8), "delta"), {"q_num_heads": 2, "kv_num_heads": 2}, "decay"),
        (
            "LinearAttention",
            [normal(1, 2, 16), normal(1, 2, 24), normal(1, 2, 16)],
            {"q_num_heads": 2, "kv_num_heads": 2, "update_rule": "linear"},
            "expected a key with heads of the query's size, whose number divides kv_num_heads",
        ),
        ("CausalConvWithState", [normal(1, 2, 3), normal(2, 1, 3), None, normal(1, 2, 3)], {}, r"\[1,2,2\]"),
        ("GatedRMSNorm", [normal(1, 12), normal(8), normal(1, 12)], {}, "a multiple of 8"),
    ],
)
def test_unfit_state_operators_are_refused(
    op_type: str, inputs: list[Any], attributes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        run(op_type, inputs, domain="com.microsoft", outputs=("float",), **attributes)
