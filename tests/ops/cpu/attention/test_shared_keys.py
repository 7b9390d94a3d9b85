# SPDX-License-Identifier: Apache-2.0
"""Attention to keys and values that another layer's attention has appended, against attention that appends them."""

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from flownpu.ops.definitions.flow_qkv_attention import reference
from tests.ops.cpu.attention.conversation import ATTENTION_ISAS, CACHE_TYPES, SIZES, D, G, H, rope_tables
from tests.ops.device import run
from tests.ops.stock_onnxruntime import model_of, node, value, with_functions
from tests.ops.stock_onnxruntime import run as run_stock
from tests.pairwise import pairwise

BATCH, CAPACITY = 2, 96
NONE = np.zeros((BATCH, 0, G * D), np.float32)
RNG = np.random.default_rng(3)
NORMS = RNG.uniform(0.5, 1.5, (2, D)).astype(np.float32)
TABLES = rope_tables(CAPACITY)


def inputs_of(qkv: list[np.ndarray | None], past: list[np.ndarray], lengths: np.ndarray, total: int) -> list[Any]:
    return [*qkv, *past, lengths - 1, np.array(total, np.int32), *TABLES, None, None, *NORMS]


def both(
    tokens: int, total: int, lengths: list[int], cache: str, capacity: int = CAPACITY, **attributes: Any
) -> tuple[np.ndarray, np.ndarray]:
    """Outputs for the last tokens of a text: of attention that appends their keys, and of one that finds them."""
    attributes = {**SIZES, "do_rotary": 1, **attributes}
    options = {"cpu_isa": attributes.pop("isa")}
    rows = np.array(lengths, np.int32)
    text = np.random.default_rng(total).standard_normal((BATCH, total, (H + 2 * G) * D), dtype=np.float32)
    columns = D + 4 * (cache == "int8")
    past = [np.zeros((BATCH, G, capacity, columns), CACHE_TYPES[cache])] * 2
    before = total - tokens
    outputs = ("float", cache, cache)
    if before:
        _, *past = run(
            "FlowQKVAttention",
            inputs_of([text[:, :before], None, None], past, np.full(BATCH, before, np.int32), before),
            outputs=outputs,
            options=options,
            **attributes,
        )
    own = inputs_of([text[:, before:], None, None], past, rows, total)
    expected, *present = run("FlowQKVAttention", own, outputs=outputs, options=options, **attributes)
    query = np.ascontiguousarray(text[:, before:, : H * D])
    (found,) = run(
        "FlowQKVAttention",
        inputs_of([query, NONE, NONE], present, rows, total),
        outputs=("float",),
        options=options,
        **attributes,
    )
    return found, expected


@pytest.mark.parametrize(
    ("isa", "cache", "window", "text"),
    pairwise(ATTENTION_ISAS, list(CACHE_TYPES), [-1, 16], [(40, 40), (1, 41), (3, 50), (20, 60)]),
)
def test_shared_keys_give_bits_of_own_ones(isa: str, cache: str, window: int, text: tuple[int, int]) -> None:
    tokens, total = text
    found, expected = both(tokens, total, [total, total], cache, isa=isa, local_window_size=window)
    np.testing.assert_array_equal(found, expected)


def test_shorter_row_of_a_first_prompt() -> None:
    found, expected = both(40, 40, [40, 23], "bfloat16", isa="auto")
    np.testing.assert_array_equal(found[0], expected[0])
    np.testing.assert_array_equal(found[1, :23], expected[1, :23])


@pytest.mark.parametrize("isa", ATTENTION_ISAS)
@pytest.mark.parametrize("total", [40, 41, 60, 66])
def test_window_sized_cache_before_and_after_eviction(isa: str, total: int) -> None:
    """The newest token where a cache of 40 with a window of 16 drops 25 tokens, at 41 and 66, and where it does not."""
    attributes = {"local_window_size": 16, "sliding_window_cache": 1, "isa": isa}
    found, expected = both(1, total, [total] * 2, "bfloat16", capacity=40, **attributes)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("isa", ATTENTION_ISAS)
def test_last_tokens_alone_equal_float64(isa: str) -> None:
    """Queries of the last token of a prompt, whose other tokens only left keys and values, as Gemma 4 computes them."""
    tokens = 40
    text = np.random.default_rng(8).standard_normal((BATCH, tokens, (H + 2 * G) * D), dtype=np.float32)
    past = [np.zeros((BATCH, G, CAPACITY, D), np.float32)] * 2
    rows = np.full(BATCH, tokens, np.int32)
    attributes = {**SIZES, "do_rotary": 1, "scale": 0.2}
    given = inputs_of([text, None, None], past, rows, tokens)
    expected, key, value_ = reference(*given, **attributes)
    query = np.ascontiguousarray(text[:, -1:, : H * D])
    inputs = inputs_of([query, NONE, NONE], [key, value_], rows, tokens)
    (found,) = run("FlowQKVAttention", inputs, outputs=("float",), options={"cpu_isa": isa}, **attributes)
    # Scores of some 10 d products, and as many roundings in the exponential and the sum of 40 values around 1.
    bound = (2 * D + 64) * 2.0**-24 * 10
    np.testing.assert_allclose(found, expected[:, -1:], rtol=0, atol=bound)
    np.testing.assert_allclose(reference(*inputs, **attributes)[0], expected[:, -1:], rtol=0, atol=1e-12)


@pytest.mark.parametrize("cache", ["float", "bfloat16", "int8"])
@pytest.mark.parametrize(("tokens", "window"), [(1, -1), (1, 16), (40, -1)])
def test_definition_in_stock_onnx_runtime(cache: str, tokens: int, window: int) -> None:
    total = 40
    text = np.random.default_rng(8).standard_normal((BATCH, total, (H + 2 * G) * D), dtype=np.float32)
    columns = D + 4 * (cache == "int8")
    past = [np.zeros((BATCH, G, CAPACITY, columns), CACHE_TYPES[cache])] * 2
    rows = np.full(BATCH, total, np.int32)
    attributes = {**SIZES, "do_rotary": 1, "local_window_size": window}
    given = inputs_of([text, None, None], past, rows, total)
    expected, *present = reference(*given, **attributes)
    query = np.ascontiguousarray(text[:, total - tokens :, : H * D])
    names = ("query", "key", "value", "past_key", "past_value", "seqlens_k", "total", "cos", "sin", "", "", "qn", "kn")
    arrays = inputs_of([query, NONE, NONE], present, rows, total)
    values = [value(name, array) if name else None for name, array in zip(names, arrays, strict=True)]
    for empty in values[1:3]:
        empty.shape = ir.Shape([BATCH, 0, G * D])
    model = model_of([node("FlowQKVAttention", values, **attributes)], [one for one in values if one is not None])
    feeds = {name: array for name, array in zip(names, arrays, strict=True) if name}
    (found,) = run_stock(with_functions(model), feeds)
    np.testing.assert_allclose(found, expected[:, total - tokens :], rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"outputs": ("float", "float", "float")}, "no present_key and present_value beside keys and values of no"),
        ({"past": [None, None]}, "past_key and past_value beside keys and values of no tokens"),
        ({"total": CAPACITY + 1}, f"total_sequence_length between 0 and {CAPACITY}, got {CAPACITY + 1}"),
        ({"sliding_window_cache": 1, "local_window_size": 16}, "one token beside keys and values of no tokens"),
    ],
)
def test_calls_that_do_not_fit_are_refused(change: dict[str, Any], message: str) -> None:
    tokens, total = 3, change.pop("total", 40)
    past = change.pop("past", [np.zeros((BATCH, G, CAPACITY, D), np.float32)] * 2)
    outputs = change.pop("outputs", ("float",))
    query = np.zeros((BATCH, tokens, H * D), np.float32)
    inputs = inputs_of([query, NONE, NONE], past, np.full(BATCH, total, np.int32), total)
    with pytest.raises(ValueError, match=message):
        run("FlowQKVAttention", inputs, outputs=outputs, **{**SIZES, "do_rotary": 1, **change})
