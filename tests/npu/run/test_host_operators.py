# SPDX-License-Identifier: Apache-2.0
"""The host's steps between dispatches: results against float64, transfers, refusals."""

import dataclasses
import re

import numpy as np
import pytest

from flownpu import _native
from flownpu.aie.designs.decode_layer.shape import LayerShape
from flownpu.aie.plan.data import DTYPES
from flownpu.aie.programs.host import Experts, NormOfRows, norm_rope
from flownpu.aie.programs.program import attribute_words
from flownpu.ops.definitions.int8_cache import quantise_rows
from flownpu.selftest.reference.layer import rotary_table
from tests.aie.host_kernels import BF16_ROUNDING, BFLOAT16, F32_ROUNDING, assert_within, bf16, wide
from tests.npu.arrays import npu
from tests.ops.device import ISAS

EPSILON, ROWS, COLUMNS, PAD = 1e-3, 19, 96, 32  # threads cannot share 19 rows evenly; a large epsilon shows
NOT_WRITTEN = 7.0
# Computed in f32: sums of COLUMNS squares, a root, three products. Results in bf16 are rounded once more.
F32_RELATIVE = (COLUMNS + 8) * F32_ROUNDING


def operator(call, label="here", **options):
    buffers = [(buffer.name, buffer.type.bytes) for buffer in call.buffers]
    parameters = {key: list(attribute_words(value)) for key, value in call.parameters}
    return npu.HostOperator(call.operator, label, parameters, buffers, **options)


def run(call, arrays, position=0, constant=(), rows=ROWS, **options):
    """Runs a call on `arrays`, and may write some of them; `rows` rows have a token. Returns the transfers."""
    given = [(arrays[b.name].reshape(-1).view(np.uint8), b.name in constant) for b in call.buffers]
    for (array, _), buffer in zip(given, call.buffers, strict=True):
        assert array.size == buffer.type.bytes, buffer.name
    names = [buffer.name for buffer in call.buffers]
    return [(names[number], *rest) for number, *rest in operator(call, **options).run(given, position, rows)]


def rms_norm(x, weight):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + EPSILON) * weight


def layer_norm(x, weight, bias):
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + EPSILON) * weight + bias


def rows_of(rng, line, dtype=BFLOAT16):
    return (rng.normal(size=(ROWS, line)) * 3).astype(dtype)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("stream", ["bf16", "f32"])
@pytest.mark.parametrize("name", ["rms_norm", "add_rms_norm", "rms_norm_add", "rms_norm_sum", "add_layer_norm"])
def test_row_norms_equal_float64(rng, name, stream, isa):
    call = NormOfRows(name, ROWS, COLUMNS, EPSILON, COLUMNS + PAD, COLUMNS + 2 * PAD, COLUMNS + PAD).call(stream)
    weight = bf16(rng.normal(size=call.buffers[-2 - (name != "rms_norm")].type.elements))
    arrays = {
        "x": rows_of(rng, COLUMNS + PAD),
        "residual": rows_of(rng, COLUMNS, BFLOAT16 if stream == "bf16" else np.float32),
        "weight": weight,
        "s": np.full((ROWS, COLUMNS), NOT_WRITTEN, np.float32),
        "y": np.full((ROWS, COLUMNS + 2 * PAD), NOT_WRITTEN, BFLOAT16),
    }
    x, before, weights = wide(arrays["x"][:, :COLUMNS]), arrays["residual"].astype(np.float64), wide(weight)
    first, last = weights[:COLUMNS], weights[-COLUMNS:]
    added = rms_norm(x, first) if name in {"rms_norm_add", "rms_norm_sum"} else x
    s = x if name == "rms_norm" else before + added
    y = layer_norm(s, first, last) if name == "add_layer_norm" else s if name == "rms_norm_sum" else rms_norm(s, last)
    run(call, arrays, isa=isa)
    if name != "rms_norm":
        assert_within(arrays["s"], s, F32_RELATIVE * (np.abs(added) + np.abs(before)))
    size = np.abs(y) + np.abs(last) + 1  # a layer norm subtracts a mean and adds a bias
    found = arrays["y"][:, :COLUMNS]
    assert_within(found, y, BF16_ROUNDING * np.abs(y) + 8 * F32_RELATIVE * size)
    assert (wide(arrays["y"][:, COLUMNS:]) == NOT_WRITTEN).all()


def test_residual_is_added_in_place(rng):
    """In programs the sum overwrites the residual stream that it was added to."""
    call = NormOfRows("add_rms_norm", ROWS, COLUMNS, EPSILON).call()
    stream = rows_of(rng, COLUMNS, np.float32)
    arrays = {
        "x": rows_of(rng, COLUMNS), "residual": stream, "weight": bf16(np.ones(COLUMNS)), "s": stream,
        "y": np.zeros((ROWS, COLUMNS), BFLOAT16),
    }  # fmt: skip
    expected = wide(arrays["x"]) + stream
    run(call, arrays)
    np.testing.assert_array_equal(stream, expected.astype(np.float32))


SHAPE = LayerShape(128, 4, 2, 32, 128, "swiglu", qk_norm=True)
CONTEXT, TOKENS, POSITION = 40, 19, 12
END = 32  # where writing ends: at a multiple of 8, the neighbours that share an exponent in bfp16


def rope_arrays(rng, shape, line):
    heads, kv_heads, d = shape.heads, shape.kv_heads, shape.d
    return {
        "qkv": bf16(rng.normal(size=(TOKENS, line))),
        "rotary": np.stack([rotary_table(CONTEXT, d, base) for base in (1e4, 1e6)]),
        "norms": bf16(rng.normal(size=sum(shape.qk_norm_sizes))),
        "q": np.full((TOKENS, heads, d), NOT_WRITTEN, BFLOAT16),
        "cache": np.full((CONTEXT, kv_heads, 2, d), NOT_WRITTEN, BFLOAT16),
    }


def rope_call(shape, line):
    return norm_rope(shape, TOKENS, CONTEXT, line=line, table=1, tables=2, epsilon=EPSILON)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("qk_norm", ["each head", "all heads", "none"])
def test_norm_rope_writes_new_positions_alone(rng, qk_norm, isa):
    shape = dataclasses.replace(SHAPE, qk_norm=qk_norm != "none", norm_of_all_heads=qk_norm == "all heads")
    packed = (shape.heads + 2 * shape.kv_heads) * shape.d
    arrays = rope_arrays(rng, shape, packed + PAD)
    by_head = wide(arrays["qkv"][:, :packed]).reshape(TOKENS, -1, shape.d)
    parts = np.split(by_head, [shape.heads, shape.heads + shape.kv_heads], axis=1)
    cosine, sine = np.split(wide(arrays["rotary"][1, POSITION : POSITION + TOKENS])[:, None], 2, axis=-1)
    turned = []
    for part, norm in zip(parts, np.split(wide(arrays["norms"]), [shape.qk_norm_sizes[0]]), strict=False):
        x = part
        if qk_norm != "none":  # the norm's elements say whether it is of one head or of all
            x = rms_norm(part.reshape(TOKENS, -1, norm.size), norm).reshape(part.shape)
        a, b = np.split(x, 2, axis=-1)
        off = F32_RELATIVE * (np.abs(a) + np.abs(b))
        made = np.concatenate([a * cosine - b * sine, b * cosine + a * sine], -1)
        turned.append((made, BF16_ROUNDING * np.abs(made) + np.concatenate([off, off], -1)))
    before = arrays["cache"].copy()
    run(rope_call(shape, packed + PAD), arrays, POSITION, isa=isa)
    assert_within(arrays["q"], *turned[0])
    written = arrays["cache"][POSITION : POSITION + TOKENS]
    assert_within(written[:, :, 0], *turned[1])
    np.testing.assert_array_equal(wide(written[:, :, 1]), parts[2])
    assert not arrays["cache"][POSITION + TOKENS : END].any()
    arrays["cache"][POSITION:END] = before[POSITION:END]
    assert arrays["cache"].tobytes() == before.tobytes()


@pytest.mark.parametrize("isa", ISAS)
def test_norm_rope_writes_rows_of_int8(rng, isa):
    """A row is the cache's, rounded; its padding and the rows of other positions are left."""
    shape = LayerShape(128, 2, 2, 64, 128, "swiglu", int8_cache=True)
    arrays = rope_arrays(rng, shape, 6 * 64)
    arrays["int8_rows"] = np.full((CONTEXT, 2, 2, 80), 7, np.uint8)
    moved = run(rope_call(shape, 6 * 64), arrays, POSITION, isa=isa)
    expected = np.full_like(arrays["int8_rows"], 7)
    written = slice(POSITION, POSITION + TOKENS)
    expected[written, ..., :68] = quantise_rows(wide(arrays["cache"][written])).view(np.uint8)
    np.testing.assert_array_equal(arrays["int8_rows"], expected)
    assert ("int8_rows", "to_device", POSITION * 320, TOKENS * 320) in moved


# --- Rows that only fill a chunk --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["rms_norm", "add_rms_norm", "rms_norm_add", "rms_norm_sum", "add_layer_norm"])
def test_norm_leaves_rows_without_token_untouched(rng, name):
    call = NormOfRows(name, ROWS, COLUMNS, EPSILON).call()
    whole = {
        buffer.name: rng.normal(size=buffer.type.elements).astype(DTYPES[buffer.type.dtype]) for buffer in call.buffers
    }
    part = {key: array.copy() for key, array in whole.items()}
    run(call, whole)
    moved = run(call, part, rows=5)
    for key in {"s", "y"} & set(part):
        found, all_rows = (arrays[key].reshape(ROWS, COLUMNS) for arrays in (part, whole))
        assert found[:5].tobytes() == all_rows[:5].tobytes()
        assert not (found[5:] == all_rows[5:]).all(axis=1).any()
    sizes = {buffer.name: buffer.type.bytes // ROWS * 5 for buffer in call.buffers}
    assert [(key, size) for key, _, _, size in moved if key != "weight"] == [
        (key, sizes[key]) for key in ("x", "residual", "s", "y") if key in sizes
    ]


def test_heads_leave_rows_without_token_untouched(rng):
    """Zeros follow the last key up to a multiple of 8 positions, which share exponents."""
    packed = (SHAPE.heads + 2 * SHAPE.kv_heads) * SHAPE.d
    whole = rope_arrays(rng, SHAPE, packed)
    part = {key: array.copy() for key, array in whole.items()}
    call, tokens = rope_call(SHAPE, packed), 5
    run(call, whole, POSITION)
    moved = run(call, part, POSITION, constant=("rotary", "norms"), rows=tokens)
    assert part["q"][:tokens].tobytes() == whole["q"][:tokens].tobytes()
    assert (wide(part["q"][tokens:]) == NOT_WRITTEN).all()
    end = POSITION + tokens
    assert part["cache"][:end].tobytes() == whole["cache"][:end].tobytes()
    assert not part["cache"][end:24].any()
    assert (wide(part["cache"][24:]) == NOT_WRITTEN).all()
    position = SHAPE.kv_heads * 2 * SHAPE.d * 2
    assert moved == [
        ("qkv", "to_host", 0, part["qkv"][:tokens].nbytes),
        ("q", "to_device", 0, part["q"][:tokens].nbytes),
        ("cache", "to_device", POSITION * position, (24 - POSITION) * position),
    ]


def test_zeros_end_with_cache():
    shape = LayerShape(128, 4, 2, 32, 128, "swiglu")
    call = norm_rope(shape, TOKENS, 37, line=256, table=0, tables=1, epsilon=EPSILON)
    arrays = {buffer.name: np.ones(buffer.type.elements, BFLOAT16) for buffer in call.buffers}
    (*_, cache) = run(call, arrays, 37 - TOKENS)
    assert cache[3] == TOKENS * 2 * shape.kv_heads * shape.d * 2


# --- What is moved ----------------------------------------------------------------------------------------------------


def test_transfers_are_limited_to_needed_views(rng):
    """Whole views unless they are constants; of the cache only the written positions and the zeros behind them."""
    packed = (SHAPE.heads + 2 * SHAPE.kv_heads) * SHAPE.d
    arrays = rope_arrays(rng, SHAPE, packed)
    moved = run(rope_call(SHAPE, packed), arrays, POSITION, constant=("rotary", "norms"))
    position = SHAPE.kv_heads * 2 * SHAPE.d * 2
    assert moved == [
        ("qkv", "to_host", 0, arrays["qkv"].nbytes),
        ("q", "to_device", 0, arrays["q"].nbytes),
        ("cache", "to_device", POSITION * position, (END - POSITION) * position),
    ]
    call = NormOfRows("add_rms_norm", ROWS, COLUMNS, EPSILON).call()
    arrays = {
        "x": rows_of(rng, COLUMNS), "residual": rows_of(rng, COLUMNS, np.float32), "weight": bf16(np.ones(COLUMNS)),
        "s": np.zeros((ROWS, COLUMNS), np.float32), "y": np.zeros((ROWS, COLUMNS), BFLOAT16),
    }  # fmt: skip
    assert run(call, arrays, constant=("weight",)) == [
        ("x", "to_host", 0, arrays["x"].nbytes),
        ("residual", "to_host", 0, arrays["residual"].nbytes),
        ("s", "to_device", 0, arrays["s"].nbytes),
        ("y", "to_device", 0, arrays["y"].nbytes),
    ]


def test_step_bytes_are_counted():
    call = rope_call(SHAPE, 300)
    row = (SHAPE.heads + 2 * SHAPE.kv_heads) * SHAPE.d
    assert call.reads == 2 * (TOKENS * (row + SHAPE.d) + 2 * SHAPE.d)
    assert call.writes == 2 * TOKENS * row
    norm = NormOfRows("rms_norm_add", ROWS, COLUMNS, EPSILON, x_line=128, weight_line=128).call()
    assert (norm.reads, norm.writes) == (6 * ROWS * COLUMNS + 2 * (128 + COLUMNS), 6 * ROWS * COLUMNS)
    assert norm.array == "host"


# --- Experts ----------------------------------------------------------------------------------------------------------


FEED_FORWARD = _native.FeedForward(size=64, activation="swiglu", experts=5, experts_per_token=3)
EXPERTS = Experts(0, FEED_FORWARD, COLUMNS, EPSILON)


@pytest.mark.parametrize("isa", ISAS)
def test_answers_of_experts_are_added_by_share(rng, isa):
    call = EXPERTS.add(COLUMNS + PAD)
    arrays = {
        "answers": bf16(rng.normal(size=(3, COLUMNS + PAD))),
        "shares": rng.uniform(size=3).astype(np.float32),
        "s": rng.normal(size=COLUMNS).astype(np.float32),
        "y": np.full(COLUMNS, NOT_WRITTEN, BFLOAT16),
    }
    terms = arrays["shares"].astype(np.float64)[:, None] * wide(arrays["answers"][:, :COLUMNS])
    expected = arrays["s"] + terms.sum(0)
    # Three multiply-adds in f32; y is rounded once more.
    tolerance = 4 * F32_ROUNDING * (np.abs(arrays["s"]) + np.abs(terms).sum(0))
    moved = run(call, arrays, isa=isa)
    assert_within(arrays["s"], expected, tolerance)
    assert_within(arrays["y"], expected, tolerance + BF16_ROUNDING * np.abs(expected))
    assert [transfer[:2] for transfer in moved] == [
        ("answers", "to_host"), ("s", "to_host"), ("s", "to_device"), ("y", "to_device"),
    ]  # fmt: skip


@pytest.mark.parametrize("call", [EXPERTS.route(), EXPERTS.compute(ROWS)], ids=["route", "experts"])
def test_experts_of_dense_decoder_are_refused(call):
    arrays = {buffer.name: np.zeros(buffer.type.elements, DTYPES[buffer.type.dtype]) for buffer in call.buffers}
    with pytest.raises(RuntimeError, match="expected a decoder with experts for a program that computes them"):
        run(call, arrays)


# --- What is refused --------------------------------------------------------------------------------------------------


def changed(call, key, value):
    parameters = tuple((name, value if name == key else old) for name, old in call.parameters)
    return dataclasses.replace(call, parameters=parameters)


NORM = NormOfRows("add_rms_norm", ROWS, COLUMNS, EPSILON).call()
ROPE = rope_call(SHAPE, 256)
INT8 = rope_call(LayerShape(128, 2, 2, 64, 128, "swiglu", int8_cache=True), 384)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            changed(INT8, "head_size", 8),
            "expected heads whose rows of int8 have room for a scale, got 8 elements",
        ),
        (
            dataclasses.replace(NORM, operator="group_norm"),
            "expected an operator of rms_norm, add_rms_norm, rms_norm_add, rms_norm_sum, add_layer_norm, norm_rope, "
            "experts, route, add_experts, mixer, before_delta, after_delta, output_gate, got group_norm: build the "
            "designs with the flownpu that runs them",
        ),
        (changed(NORM, "columns", 97), "expected a x_line of 97 or more, got 96"),
        (changed(NORM, "rows", 0), "expected a rows of 1 or more, got 0"),
        (changed(NORM, "rows", 20), f"expected x of {20 * COLUMNS * 2} bytes, got x of {ROWS * COLUMNS * 2}"),
        (dataclasses.replace(NORM, parameters=NORM.parameters[:2]), "expected a number as its parameter x_line"),
        (dataclasses.replace(NORM, arguments=NORM.arguments[:1]), "expected more than 1 arguments, got 1"),
        (changed(ROPE, "table", 2), "expected a table below 2, got 2"),
        (changed(ROPE, "qk_norm", 0), "expected 4 arguments, got 5"),
        (changed(ROPE, "context", 41), "expected rotary of"),
    ],
)  # fmt: skip
def test_unfit_host_operator_is_refused_by_name(call, message):
    with pytest.raises(RuntimeError, match=re.escape(f"[FlowNPU] norm, layer 3, on the host: {message}")):
        operator(call, "norm, layer 3")


@pytest.mark.parametrize("position", [-1, CONTEXT - TOKENS + 1])
def test_positions_past_end_of_cache_are_refused(rng, position):
    arrays = rope_arrays(rng, SHAPE, 256)
    before = arrays["cache"].tobytes()
    with pytest.raises(
        RuntimeError, match=rf"here, on the host: expected 19 positions below 40, got {position} and on"
    ):
        run(ROPE, arrays, position)
    assert arrays["cache"].tobytes() == before
