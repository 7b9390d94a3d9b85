# SPDX-License-Identifier: Apache-2.0
"""Attention of exports and of FlowNPU, with nodes that are folded into it; and RoPE outside of it."""

from typing import Any

import numpy as np
from onnx import TensorProto

from tests.fuzz.graphs.builder import ABSENT, Builder, Value
from tests.fuzz.operators import Operators
from tests.fuzz.operators.elementwise import MICROSOFT
from tests.fuzz.operators.quantised import FLOAT, flow_node, n_bits, rows_of

INT64, INT32 = TensorProto.INT64, TensorProto.INT32
TABLE = 64  # positions that RoPE tables hold


def rotary_tables(b: Builder, half: int) -> list[Value]:
    """RoPE's tables cos and sin, [TABLE, half]."""
    angles = np.arange(TABLE)[:, None] * 100.0 ** (-np.arange(half) / max(half, 1))
    short = b.mistake()
    shape = (TABLE if not short else 2, half)
    return [b.source(FLOAT, shape, constant=True, given=f(angles)[: shape[0]].reshape(-1)) for f in (np.cos, np.sin)]


def rotary(b: Builder) -> None:
    """RotaryEmbedding of com.microsoft, or of ONNX."""
    standard = b.opset >= 23 and b.choices.chance(50)
    batch, tokens = b.choices.pick((1, 2)), b.choices.pick((3, 1, 5))
    heads, d = b.choices.pick((2, 1, 4)), b.choices.pick((8, 16, 32))
    partial = b.choices.chance(25)
    size = d // 2 if partial else 0
    four = b.choices.chance(30)
    shape = (batch, heads, tokens, d) if four else (batch, tokens, heads * d)
    x = b.like(FLOAT, shape)
    angles = None
    if standard and b.choices.chance(40):
        ids, angles = ABSENT, (batch, tokens, (size or d) // 2)
    elif not standard and b.choices.chance(40):
        ids = b.integers([b.choices.below(8)], shape=(1,))
    else:
        ids = b.integers([b.choices.below(32) for _ in range(batch * tokens)], shape=(batch, tokens))
    cos, sin = [b.like(FLOAT, angles) for _ in range(2)] if angles else rotary_tables(b, (size or d) // 2)
    attributes = {"interleaved": b.choices.pick((None, 1)), "rotary_embedding_dim": size or None}
    attributes["num_heads"] = heads if partial or b.choices.chance(50) or standard else None
    inputs, domain = ([x, cos, sin, ids], "") if standard else ([x, ids, cos, sin], MICROSOFT)
    b.node("RotaryEmbedding", inputs, [(FLOAT, shape)], domain, **attributes)


class Attention:
    """Random sizes and inputs of an attention node."""

    def __init__(self, b: Builder) -> None:
        choices = b.choices
        self.b = b
        self.groups = choices.pick((1, 2, 1))
        self.heads = self.groups * choices.pick((1, 2, 3))
        self.d = choices.pick((16, 32, 64, 8, 80))
        self.batch, self.tokens = choices.pick((1, 1, 2)), choices.pick((1, 3, 4, 9))
        self.past = choices.pick((0, 3, 5)) if self.batch == 1 or self.tokens == 1 else 0
        self.total = self.past + self.tokens
        lengths = [self.total] * self.batch
        if self.batch > 1 and choices.chance(40):
            lengths[1] = max(1, self.total - choices.between(1, 2))
        self.lengths = lengths
        self.room = choices.pick((0, 0, 4))
        self.is_cached = self.past > 0 or choices.chance(50)
        self.do_rotary = choices.chance(40) and self.d % 16 == 0
        self.packed = choices.chance(30)

    def cache(self, kind: int = FLOAT) -> list[Value]:
        """Past key and value, or absent inputs."""
        if not self.is_cached:
            return [ABSENT, ABSENT]
        shape = (self.batch, self.groups, self.past + self.room, self.d)
        return [self.b.source(kind, shape, constant=False) for _ in range(2)]

    def query_key_value(self) -> list[Value]:
        """Query, key and value: packed, from a Split, from three products, or plain values."""
        b, widths = self.b, (self.heads * self.d, self.groups * self.d, self.groups * self.d)
        shapes = [(self.batch, self.tokens, width) for width in widths]
        how = b.choices.pick(("plain", "products", "split", "plain"))
        if self.packed:
            return [rows_packed(b, self, sum(widths)), ABSENT, ABSENT]
        if how == "split" and b.opset >= 13:
            whole = b.source(FLOAT, (*shapes[0][:2], sum(widths)), constant=False)
            sizes = b.integers(list(widths), constant=True)
            return b.node("Split", [whole, sizes], [(FLOAT, shape) for shape in shapes], axis=-1)
        if how == "products":
            x = b.source(FLOAT, (self.batch, self.tokens, b.choices.pick((32, 64, 48))), constant=False)
            return [n_bits(b, x, width, plain=True) for width in widths]
        return [b.like(FLOAT, shape) for shape in shapes]

    def normalised(self, vectors: list[Value]) -> list[Value]:
        """The vectors, sometimes with norms of query and key heads, as graphs have them before attention."""
        b = self.b
        if self.packed or b.opset < 14 or not b.choices.chance(25):
            return vectors
        made = []
        for x, heads in zip(vectors[:2], (self.heads, self.groups), strict=True):
            apart = (self.batch, self.tokens * heads, self.d)
            target = b.integers([0, -1, self.d], constant=True)
            cut = b.node("Reshape", [x, target], [(FLOAT, apart)])[0]
            weight = b.source(FLOAT, (self.d,), constant=True)
            norm = b.node("SimplifiedLayerNormalization", [cut, weight], [(FLOAT, apart)], axis=-1, epsilon=1e-6)[0]
            back = b.integers([0, -1, heads * self.d], constant=True)
            made.append(b.node("Reshape", [norm, back], [(FLOAT, x.shape)])[0])
        return [*made, *vectors[2:]]

    def lengths_of(self) -> list[Value]:
        """seqlens_k and total_sequence_length."""
        b = self.b
        constant = b.choices.chance(20)
        ends = [length - 1 for length in self.lengths]
        shape = (self.batch,) if not b.choices.chance(20) else (self.batch, 1)
        total = b.integers([self.total], INT32, shape=b.choices.pick(((), (1,))), constant=b.choices.chance(50))
        return [b.integers(ends, INT32, shape=shape, constant=constant), total]

    def positions(self) -> Value:
        b = self.b
        if not self.do_rotary or not b.choices.chance(20):
            return ABSENT
        # For a first prompt ONNX Runtime reads only the first position.
        starts = [length - self.tokens if self.past else 0 for length in self.lengths]
        numbers = [max(0, start) + i for start in starts for i in range(self.tokens)]
        return b.integers(numbers, INT64, shape=(self.batch, self.tokens))

    def bias(self) -> Value:
        b = self.b
        if not b.choices.chance(15):
            return ABSENT
        shape = (b.choices.pick((1, self.batch)), b.choices.pick((1, self.heads)), self.tokens, self.total)
        return b.source(FLOAT, shape)

    def presents(self, kind: int = FLOAT) -> list[tuple[int, tuple[int, ...]]]:
        capacity = max(self.past + self.room if self.is_cached else 0, self.total)
        return [(kind, (self.batch, self.groups, capacity, self.d))] * 2


def rows_packed(b: Builder, attention: Attention, width: int) -> Value:
    """Query, key and value packed side by side."""
    shape = (attention.batch, attention.tokens, width)
    if b.choices.chance(40):
        return n_bits(b, b.source(FLOAT, (*shape[:2], 32), constant=False), width, plain=True)
    return b.like(FLOAT, shape)


def group_query_attention(b: Builder) -> None:
    """com.microsoft GroupQueryAttention with float activations, mostly as ONNX Runtime's kernel takes it."""
    a = Attention(b)
    kind = b.choices.pick((FLOAT, FLOAT, TensorProto.FLOAT16)) if a.is_cached else FLOAT
    inputs = a.normalised(a.query_key_value()) + a.cache(kind) + a.lengths_of()
    inputs += rotary_tables(b, a.d // 2) if a.do_rotary else [ABSENT, ABSENT]
    inputs += [a.positions(), a.bias()]
    inputs.append(b.source(FLOAT, (a.heads,), constant=True) if b.choices.chance(10) else ABSENT)
    if b.choices.chance(1):  # ONNX Runtime's CPU provider refuses them
        inputs += [ABSENT, ABSENT, *(b.source(FLOAT, (a.d,), constant=True) for _ in range(2))]
    attributes: dict[str, Any] = {
        "num_heads": a.heads,
        "kv_num_heads": a.groups,
        "do_rotary": int(a.do_rotary) or None,
        "rotary_interleaved": 1 if a.do_rotary and b.choices.chance(20) else None,
        "scale": b.choices.pick((None, 0.2)),
        "softcap": b.choices.pick((None, None, 5.0)),
        "local_window_size": b.choices.pick((None, -1, 2, 4)),
        "smooth_softmax": 1 if b.choices.chance(8) else None,
    }
    if b.choices.chance(5):
        attributes |= b.choices.pick(
            ({"causal": 0}, {"qk_norm_epsilon": 0.1}, {"qk_output": 1}, {"k_quant_type": "PER_TENSOR"}, {"causal": 1})
        )
    _mistake(b, inputs, attributes)
    outputs = [(FLOAT, (a.batch, a.tokens, a.heads * a.d)), *a.presents(kind)]
    if b.choices.chance(2):
        outputs = outputs[:1]
    b.node("GroupQueryAttention", inputs, outputs, MICROSOFT, **attributes)


def flow_attention(b: Builder) -> None:
    """FlowQKVAttention, or for one token FlowKVAttention."""
    a = Attention(b)
    kind = b.choices.pick((FLOAT, TensorProto.BFLOAT16, TensorProto.FLOAT16)) if a.is_cached else FLOAT
    causal = b.choices.pick((None, None, None, 0)) if a.past == 0 else None
    inputs = a.query_key_value() + a.cache(kind)
    named = a.is_cached or b.choices.chance(50)
    inputs += a.lengths_of() if named else [ABSENT, ABSENT]
    inputs += rotary_tables(b, a.d // 2) if a.do_rotary else [ABSENT, ABSENT]
    inputs += [a.positions(), a.bias()]
    norms = b.choices.chance(25)
    inputs += [b.source(FLOAT, (a.d,), constant=True) if norms else ABSENT for _ in range(2)]
    blocks = ABSENT
    if b.choices.chance(15):
        numbers = [0, 1, 1, 0, 2, 2, 2, 0, 3][: a.tokens] * a.batch
        blocks = b.integers(numbers, INT32, shape=(a.batch, a.tokens))
    inputs += [blocks, b.source(FLOAT, (a.heads,), constant=True) if b.choices.chance(15) else ABSENT]
    attributes: dict[str, Any] = {
        "num_heads": a.heads,
        "kv_num_heads": a.groups,
        "head_size": a.d,
        "causal": causal,
        "do_rotary": int(a.do_rotary) or None,
        "scale": b.choices.pick((None, 0.2)),
        "softcap": b.choices.pick((None, None, 5.0)),
        "local_window_size": b.choices.pick((None, -1, 2, 4)) if causal is None else None,
        "qk_norm_epsilon": b.choices.pick((None, 1e-3)),
    }
    _mistake(b, inputs, attributes)
    op_type = "FlowKVAttention" if a.tokens == 1 and b.choices.chance(60) else "FlowQKVAttention"
    outputs = [(FLOAT, (a.batch, a.tokens, a.heads * a.d)), *a.presents(kind)]
    if not a.is_cached and causal == 0 and b.choices.chance(50):
        outputs = outputs[:1]
    flow_node(b, op_type, inputs, outputs, **attributes)


def _mistake(b: Builder, inputs: list[Value], attributes: dict[str, Any]) -> None:
    """Sometimes makes a mistake: another number of heads or window, or another shape of one input."""
    if b.mistake(25):
        name = b.choices.pick(("num_heads", "kv_num_heads", "local_window_size", "head_size"))
        if name in attributes:
            # A window of 2^40 is left out: ONNX Runtime reads only its low 32 bits.
            attributes[name] = b.choices.pick((0, -1, 3, 7) if name == "local_window_size" else (0, -1, 3, 7, 2**40))
    if b.mistake(35):
        place = b.choices.below(len(inputs))
        value = inputs[place]
        if value.name and value.type in (FLOAT, INT32, INT64):
            shape = list(value.shape) or [1]
            axis = b.choices.below(len(shape))
            shape[axis] = max(0, shape[axis] + b.choices.pick((1, -1, -2, 9)))
            inputs[place] = b.source(value.type, tuple(shape), constant=value.constant)


def standard_attention(b: Builder) -> None:
    """ONNX's Attention, mostly as the device takes it: as many keys as queries, beside those of a past."""
    batch, tokens, past = b.choices.pick((1, 2)), b.choices.pick((3, 1, 6)), b.choices.pick((0, 0, 4))
    groups, d = b.choices.pick((1, 2)), b.choices.pick((8, 16, 4))
    heads = groups * b.choices.pick((1, 2, 3))
    by_head = b.choices.chance(60)
    keys = tokens if not b.choices.chance(6) or past else tokens + 2
    vectors = [
        b.like(FLOAT, (batch, count, rows, d) if by_head else (batch, rows, count * d))
        for count, rows in ((heads, tokens), (groups, keys), (groups, keys))
    ]
    mask = ABSENT
    if b.choices.chance(50):
        all_axes = (batch, heads, tokens, past + keys)
        shape = all_axes[b.choices.below(3) :] if b.choices.chance(50) else (1, 1, tokens, past + keys)
        mask = b.source(TensorProto.BOOL if b.choices.chance(50) else FLOAT, shape)
    shape = (batch, groups, past, d)
    pasts = [b.source(FLOAT, shape), b.source(FLOAT, shape)] if past else [ABSENT, ABSENT]
    outputs: list[tuple[int, tuple[int, ...]] | None] = [(FLOAT, vectors[0].shape)]
    if past:
        outputs += [(FLOAT, (batch, groups, past + keys, d))] * 2
    attributes: dict[str, Any] = {"is_causal": b.choices.pick((None, 0, 1)), "scale": b.choices.pick((None, 0.25))}
    attributes["softcap"] = b.choices.pick((None, None, 3.0))
    attributes |= {} if by_head else {"q_num_heads": heads, "kv_num_heads": groups}
    b.node("Attention", [*vectors, mask, *pasts], outputs, **attributes)


def rows_through_norm(b: Builder) -> None:
    """The beginning of a layer: a norm, a product, and a norm with a residual."""
    x = rows_of(b, b.choices.pick((32, 64)))
    if x.rank != 3:
        x = b.source(FLOAT, (1, 3, 32), constant=False)
    weight = b.source(FLOAT, x.shape[-1:], constant=True)
    y = b.node("SimplifiedLayerNormalization", [x, weight], [(FLOAT, x.shape)], axis=-1, epsilon=1e-6)[0]
    z = n_bits(b, y, x.shape[-1], plain=True)
    gamma = b.source(FLOAT, x.shape[-1:], constant=True)
    outputs = [(FLOAT, x.shape), None, None, (FLOAT, x.shape)]
    b.node("SkipSimplifiedLayerNormalization", [x, z, gamma], outputs, MICROSOFT, epsilon=1e-6)


OPERATORS: Operators = [
    (12, "RotaryEmbedding", 7, rotary),
    (20, "Attention", 23, standard_attention),
    (34, "GroupQueryAttention", 7, group_query_attention),
    (34, "FlowQKVAttention", 21, flow_attention),
    (8, "norm, product, norm", 7, rows_through_norm),
]
