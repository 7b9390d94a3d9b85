# SPDX-License-Identifier: Apache-2.0
"""Layers with states: linear attention, causal convolutions, their gates and norms, rotation by three positions."""

import numpy as np
from onnx import TensorProto

from tests.fuzz.graphs.builder import ABSENT, Builder, Value
from tests.fuzz.operators import Operators

FLOAT = TensorProto.FLOAT
MICROSOFT = "com.microsoft"
SIZES = (8, 1, 3, 40)


def linear_attention(b: Builder) -> None:
    batches, tokens = b.choices.pick((1, 2)), b.choices.pick((1, 3, 2, 7))
    queries, keys, values = b.choices.pick(((2, 2, 2), (1, 1, 2), (4, 2, 2), (3, 3, 3)))
    key_size, value_size = b.choices.pick(SIZES), b.choices.pick(SIZES)
    rule = b.choices.pick(("gated_delta", "delta", "gated", "linear"))

    def rows(columns: int) -> Value:
        return b.like(FLOAT, (batches, tokens, columns))

    state = (batches, values, key_size, value_size)
    decays = values * b.choices.pick((1, key_size))
    inputs = [
        rows(queries * key_size),
        rows(keys * key_size),
        rows(values * value_size),
        b.like(FLOAT, state) if b.choices.chance(70) else ABSENT,
        rows(decays) if rule.startswith("gated") else ABSENT,
        rows(values) if rule.endswith("delta") else ABSENT,
    ]
    if b.mistake():
        inputs[b.choices.below(3)] = rows(5)
    outputs = [(FLOAT, (batches, tokens, max(queries, values) * value_size)), (FLOAT, state)]
    heads = {"q_num_heads": queries, "kv_num_heads": values}
    scale = b.choices.pick((None, 0.25))
    b.node("LinearAttention", inputs, outputs, domain=MICROSOFT, **heads, update_rule=rule, scale=scale)


def causal_convolution(b: Builder) -> None:
    batches, channels, length, taps = (b.choices.pick(sizes) for sizes in ((1, 2), SIZES, (1, 5, 2, 33), (3, 4, 1, 2)))
    last = b.choices.chance(50)

    def shape(columns: int) -> tuple[int, int, int]:
        return (batches, columns, channels) if last else (batches, channels, columns)

    inputs = [b.like(FLOAT, shape(length)), b.source(FLOAT, (channels, 1, taps), constant=b.choices.chance(80))]
    inputs.append(b.source(FLOAT, (channels,), constant=True) if b.choices.chance(40) else ABSENT)
    inputs.append(b.like(FLOAT, shape(taps - 1)) if taps > 1 and b.choices.chance(70) else ABSENT)
    if b.mistake():
        inputs[3] = b.like(FLOAT, shape(taps))
    outputs = [(FLOAT, shape(length)), (FLOAT, shape(taps - 1))]
    activation = b.choices.pick((None, "silu", "none", "swish"))
    attributes = {"activation": activation, "channels_last": int(last)}
    b.node("CausalConvWithState", inputs, outputs, domain=MICROSOFT, **attributes)


def linear_attention_gate(b: Builder) -> None:
    shape = (b.choices.pick((1, 2)), b.choices.pick((1, 4)), b.choices.pick(SIZES))
    vectors = [b.source(FLOAT, shape[-1:], constant=True) for _ in range(2)]
    gates = [b.like(FLOAT, shape), *vectors, b.like(FLOAT, shape)]
    b.node("LinearAttentionGate", gates, [(FLOAT, shape)] * 2, domain=MICROSOFT)


def gated_rms_norm(b: Builder) -> None:
    width = b.choices.pick(SIZES)
    shape = (b.choices.pick((2, 1)), b.choices.pick((3, 1)), width * b.choices.pick((1, 2)))
    inputs = [b.like(FLOAT, shape), b.source(FLOAT, (width,), constant=True), b.like(FLOAT, shape)]
    activation = b.choices.pick((None, "silu", "sigmoid"))
    epsilon = b.choices.pick((None, 1e-6))
    b.node("GatedRMSNorm", inputs, [(FLOAT, shape)], domain=MICROSOFT, activation=activation, epsilon=epsilon)


def gated_add(b: Builder) -> None:
    shape = (*((b.choices.pick((2, 1, 3)),) * b.choices.pick((1, 2))), b.choices.pick(SIZES))
    gate = b.like(FLOAT, (*shape[:-1], 2 if b.mistake() else 1))
    b.node("GatedAdd", [b.like(FLOAT, shape), b.like(FLOAT, shape), gate], [(FLOAT, shape)], domain=MICROSOFT)


def lp_normalization(b: Builder) -> None:
    x = b.like(FLOAT, b.shape(least=1))
    axis = b.choices.pick((None, -1, b.choices.below(x.rank)))
    b.node("LpNormalization", [x], [(FLOAT, x.shape)], axis=axis, p=b.choices.pick((None, 2, 1)))


def multi_axis_rotary_embedding(b: Builder) -> None:
    batches, tokens, heads, places = b.choices.pick((1, 2)), b.choices.pick((1, 4)), b.choices.pick((1, 3)), 6
    section = list(b.choices.pick(((2, 1, 1), (1, 1, 1), (3, 0, 1))))
    half = sum(section)
    size = 2 * half + b.choices.pick((0, 8))
    by_head = b.choices.chance(50)
    shape = (batches, heads, tokens, size) if by_head else (batches, tokens, heads * size)
    given = np.random.default_rng(b.choices.seed()).integers(0, places + b.mistake(), (3, batches, tokens))
    positions = b.source(TensorProto.INT64, given.shape, constant=True, given=given.reshape(-1))
    tables = [b.source(FLOAT, (places, half), constant=True) for _ in range(2)]
    b.node(
        "MRotaryEmbedding",
        [b.like(FLOAT, shape), positions, *tables],
        [(FLOAT, shape)],
        domain=MICROSOFT,
        mrope_section=section,
        rotary_embedding_dim=2 * half,
        num_heads=heads,
        mrope_layout=b.choices.pick((None, 0, 1)),
    )


OPERATORS: Operators = [
    (8, "LinearAttention", 7, linear_attention),
    (8, "CausalConvWithState", 7, causal_convolution),
    (5, "LinearAttentionGate", 7, linear_attention_gate),
    (5, "GatedRMSNorm", 7, gated_rms_norm),
    (5, "GatedAdd", 7, gated_add),
    (5, "LpNormalization", 7, lp_normalization),
    (5, "MRotaryEmbedding", 7, multi_axis_rotary_embedding),
]
