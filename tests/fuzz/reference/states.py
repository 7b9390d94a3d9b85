# SPDX-License-Identifier: Apache-2.0
"""Bounds of the operators of layers with states.

A chain of sums is off by at most so many roundings of the same chain over magnitudes, as many as one of its terms goes
through (Higham, "Accuracy and Stability of Numerical Algorithms", section 3.1).
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from tests.fuzz.arrays import Array, limits
from tests.fuzz.reference.evaluate import Node, Table
from tests.fuzz.reference.samples import Samples, Unknown, each, unit
from tests.fuzz.reference.standard import FUNCTION_UNITS, elementwise

# Squares and their sums neither overflow nor vanish between these.
LEAST, MOST = 1e-15, 1e15


def _known(samples: Sequence[Samples | None]) -> None:
    """Raises Unknown unless all numbers are finite and so small that no chain overflows."""
    for one in samples:
        if one is not None and not (np.abs(one.numbers) < MOST).all():
            raise Unknown


def _optional(node: Node, count: int) -> list[Samples | None]:
    inputs = [node.optional(i) for i in range(count)]
    _known(inputs)
    return inputs


def _inputs(node: Node, count: int) -> list[Samples]:
    inputs = [node.float(i) for i in range(count)]
    _known(inputs)
    return inputs


def _off(made: Samples, magnitude: Array, units: float) -> Samples:
    """The samples after roundings of a chain with this magnitude."""
    if not (np.abs(magnitude) < float(limits(made.dtype).max) / 4).all():
        raise Unknown
    return made.shaken(absolute=units * unit(made.dtype) * magnitude).rounded()


def linear_attention(node: Node) -> list[Samples]:
    """ONNX's recurrence, token by token."""
    inputs = _optional(node, 6)
    query_heads, heads = int(node.attributes["q_num_heads"]), int(node.attributes["kv_num_heads"])
    rule = node.attributes.get("update_rule", b"gated_delta").decode()
    query = node.float(0)
    size = query.shape[2] // query_heads
    scale = float(node.attributes.get("scale", 0)) or size**-0.5

    def recur(sign: int, *arrays: Array | None) -> list[Array]:
        past, decay, beta = arrays[3:]
        batches, tokens = query.shape[:2]
        shapes = (batches, tokens, -1, size), (batches, tokens, -1, size), (batches, tokens, heads, -1)
        q, k, v = (np.reshape(array, shape) for array, shape in zip(arrays[:3], shapes, strict=True))
        state = np.zeros((batches, heads, size, v.shape[-1])) if past is None else past.copy()
        every = np.arange(max(query_heads, heads))
        outputs = []
        for t in range(tokens):
            key = k[:, t, np.arange(heads) * k.shape[2] // heads]
            if decay is not None and rule.startswith("gated"):
                state = state * np.exp(decay[:, t].reshape(batches, heads, -1, 1))
            update = v[:, t]
            if beta is not None and rule.endswith("delta"):
                read = np.einsum("bhij,bhi->bhj", state, key)
                update = beta[:, t].reshape(batches, -1, 1) * (update + sign * read)
            state = state + key[..., None] * update[:, :, None]
            shown = state[:, every * heads // len(every)]
            outputs.append(scale * np.einsum("bhij,bhi->bhj", shown, q[:, t, every * query_heads // len(every)]))
        return [np.stack(outputs, 1).reshape(batches, tokens, -1), state]

    decay = inputs[4]
    exponent = 0.0 if decay is None else float(np.abs(decay.numbers).max(initial=0))
    if exponent > 80:  # exp overflows
        raise Unknown
    made = each(lambda *arrays: recur(-1, *arrays), inputs, query.dtype)
    # Exponents keep their signs, though another input may be the same value.
    sizes = [None if s is None else np.abs(s.numbers[0]) for s in inputs]
    sizes[4] = None if decay is None else decay.numbers[0]
    units = (size + exponent + FUNCTION_UNITS + 6) * (query.shape[1] + 1)
    return [_off(one, magnitude, units) for one, magnitude in zip(made, recur(1, *sizes), strict=True)][: node.outputs]


def causal_convolution(node: Node) -> list[Samples]:
    """Each channel's taps over the state and the new columns."""
    inputs = _optional(node, 4)
    x, weight = node.float(0), node.float(1)
    taps = weight.shape[2]
    order = (0, 2, 1) if node.attributes.get("channels_last", 0) else (0, 1, 2)

    def convolve(x: Array, weight: Array, bias: Array | None, past: Array | None) -> list[Array]:
        x = x.transpose(order)
        state = np.zeros((*x.shape[:2], taps - 1)) if past is None else past.transpose(order)
        whole = np.concatenate([state, x], 2)
        columns = [weight[:, 0, j, None] * whole[:, :, j : j + x.shape[2]] for j in range(taps)]
        total = sum(columns, np.zeros(1) if bias is None else bias[:, None])
        return [total.transpose(order), whole[:, :, whole.shape[2] - taps + 1 :].transpose(order)]

    output, present = each(convolve, inputs, x.dtype)
    sizes: Any = [None if s is None else np.abs(s.numbers[0]) for s in inputs]
    output = _off(output, convolve(*sizes)[0], taps + 3)
    if node.attributes.get("activation", b"none") != b"none":
        output = elementwise(lambda v: v / (1 + np.exp(-v)), output, units=FUNCTION_UNITS)
    return [output, present][: node.outputs]


def linear_attention_gate(node: Node) -> list[Samples]:
    """decay = decay_scale softplus(a + dt_bias), beta = sigmoid(b)."""
    a, bias, scale, b = _inputs(node, 4)
    total = elementwise(np.add, a, bias)
    opened = elementwise(lambda v: np.logaddexp(0, v), total, units=FUNCTION_UNITS, least=2.0**-24)
    beta = elementwise(lambda v: 1 / (1 + np.exp(-v)), b, units=FUNCTION_UNITS)
    return [elementwise(np.multiply, scale, opened), beta]


def gated_rms_norm(node: Node) -> Samples:
    """x / sqrt(mean(x^2) + epsilon) scale activation(gate), for each part as wide as the scale."""
    x, scale, gate = _inputs(node, 3)
    width, epsilon = scale.shape[0], float(node.attributes.get("epsilon", 1e-5))
    silu = node.attributes.get("activation", b"silu") != b"sigmoid"

    def norm(x: Array, scale: Array, gate: Array) -> Array:
        parts = x.reshape(*x.shape[:-1], -1, width)
        normed = (parts / np.sqrt((parts**2).mean(-1, keepdims=True) + epsilon) * scale).reshape(x.shape)
        return normed * (gate if silu else 1) / (1 + np.exp(-gate))

    return elementwise(norm, x, scale, gate, units=width / 2 + 2 * FUNCTION_UNITS)


def gated_add(node: Node) -> Samples:
    """X + gate Y."""
    x, y, gate = _inputs(node, 3)
    return elementwise(np.add, x, elementwise(np.multiply, y, gate))


def lp_normalization(node: Node) -> Samples:
    """x / |x| along an axis; 0 where all of x is 0."""
    (x,) = _inputs(node, 1)
    axis, p = int(node.attributes.get("axis", -1)), int(node.attributes.get("p", 2))
    if ((x.numbers != 0) & (np.abs(x.numbers) < LEAST)).any():
        raise Unknown

    def normalise(x: Array) -> Array:
        length = np.linalg.norm(x, p, axis, keepdims=True) if x.size else np.ones(1)
        return x / np.where(length == 0, 1, length)

    return elementwise(normalise, x, units=x.shape[axis] + FUNCTION_UNITS)


def multi_axis_rotary_embedding(node: Node) -> Samples:
    """Pairs of dimensions are rotated by the angles of one of three positions each."""
    x, cos, sin = node.float(0), node.float(2), node.float(3)
    _known([x, cos, sin])
    section = [int(size) for size in node.attributes["mrope_section"]]
    half, heads = sum(section), int(node.attributes["num_heads"])
    positions = node.input(1).exact()
    if positions.min(initial=0) < 0 or positions.max(initial=0) >= cos.shape[0]:
        raise Unknown
    axes = [axis for axis, size in enumerate(section) for _ in range(size)]
    if node.attributes.get("mrope_layout", 0):
        # Pairs take turns; one whose axis has no turn left has the first axis.
        axes = [j % 3 if j % 3 and j < 3 * section[j % 3] else 0 for j in range(half)]

    def rotate(sign: int, x: Array, cos: Array, sin: Array) -> Array:
        by_head = x if x.ndim == 4 else x.reshape(*x.shape[:2], heads, -1).transpose(0, 2, 1, 3)
        c, s = (np.stack([t[positions[axes[j]], j] for j in range(half)], -1)[:, None] for t in (cos, sin))
        first, second, rest = np.split(by_head, [half, 2 * half], -1)
        turned = np.concatenate([first * c + sign * second * s, second * c + first * s, rest], -1)
        return turned if x.ndim == 4 else turned.transpose(0, 2, 1, 3).reshape(x.shape)

    (made,) = each(lambda *arrays: [rotate(-1, *arrays)], [x, cos, sin], x.dtype)
    return _off(made, rotate(1, *(np.abs(s.numbers[0]) for s in (x, cos, sin))), 4)


TABLE: Table = {
    ("com.microsoft", "LinearAttention"): linear_attention,
    ("com.microsoft", "CausalConvWithState"): causal_convolution,
    ("com.microsoft", "LinearAttentionGate"): linear_attention_gate,
    ("com.microsoft", "GatedRMSNorm"): gated_rms_norm,
    ("com.microsoft", "GatedAdd"): gated_add,
    ("", "LpNormalization"): lp_normalization,
    ("com.microsoft", "MRotaryEmbedding"): multi_axis_rotary_embedding,
}
