# SPDX-License-Identifier: Apache-2.0
"""Refusals of FlowQKVAttention: nodes when they are made, inputs when shapes are inferred; each with its reason."""

from typing import Any

import numpy as np
import pytest

from flownpu.ops.contracts import contract_of, input_names
from tests.ops.cpu.attention.conversation import SIZES, D, G, H, rope_tables
from tests.ops.device import Node, run

B, S, CAPACITY, TOTAL = 2, 3, 9, 8
WIDTH = (H + 2 * G) * D
Inputs = dict[str, np.ndarray]


def zeros(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.zeros(shape, dtype)


def call(**changed: np.ndarray | None) -> list[np.ndarray | None]:
    """A call with every input, some of them changed: 3 tokens after 5, in a cache of 9, with tables of 10 positions."""
    tables = rope_tables(10)
    given: dict[str, np.ndarray | None] = {
        "query": zeros(B, S, H * D),
        "key": zeros(B, S, G * D),
        "value": zeros(B, S, G * D),
        "past_key": zeros(B, G, CAPACITY, D),
        "past_value": zeros(B, G, CAPACITY, D),
        "seqlens_k": np.array([TOTAL - 1, TOTAL - 2], np.int32),
        "total_sequence_length": np.array(TOTAL, np.int32),
        "cos_cache": tables[0],
        "sin_cache": tables[1],
        "position_ids": np.array([[5, 6, 7], [4, 5, 6]]),
        "attention_bias": zeros(1, H, S, TOTAL),
        "q_norm_weight": zeros(D),
        "k_norm_weight": zeros(D),
        "bidirectional_blocks": zeros(B, S, dtype=np.int32),
        "head_sink": zeros(H),
    }
    return [(given | changed)[name] for name in input_names("FlowQKVAttention")]


def infer(inputs: list[np.ndarray | None], **attributes: int) -> list[list[int]]:
    """The shapes of the outputs of a node for a call that fits; nothing is computed."""
    node = Node("FlowQKVAttention", call(), ("float",) * 3, do_rotary=1, **SIZES, **attributes)
    return node.infer(*inputs)


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"kv_num_heads": 3}, "num_heads to be a multiple of kv_num_heads, got 4 and 3"),
        ({"num_heads": 2**40}, "num_heads.*got 1099511627776"),
        ({"head_size": 1024}, "head_size.*512, got 1024"),
        ({"head_size": 576}, "head_size.*512, got 576"),
        ({"local_window_size": 8, "causal": 0}, "expected no local_window_size with causal = 0"),
        ({"local_window_size": 0}, "expected local_window_size above 0, or -1 for none, got 0"),
        ({"sliding_window_cache": 1}, "expected local_window_size with sliding_window_cache = 1"),
        (
            {"sliding_window_cache": 1, "local_window_size": 4},
            "expected past_key and past_value with sliding_window_cache = 1",
        ),
        ({"do_rotary": 1}, "expected cos_cache and sin_cache with do_rotary = 1"),
        ({"do_rotary": 2}, "do_rotary.* 0 (or|to) 1, got 2"),
        ({"causal": -1}, "causal.* 0 (or|to) 1, got -1"),
        ({"rotary_interleaved": 2}, "rotary_interleaved.* 0 (or|to) 1, got 2"),
        ({"counted_prompt": 2}, "counted_prompt.* 0 (or|to) 1, got 2"),
    ],
)
def test_unfit_attributes_are_refused(attributes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Node("FlowQKVAttention", [zeros(1, 1, WIDTH)], ("float",), **(SIZES | attributes))


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("query", "query.*, got none"),
        ("value", "expected both key and value or neither"),
        ("past_value", "expected both past_key and past_value or neither"),
        ("seqlens_k", "expected both seqlens_k and total_sequence_length or neither"),
        ("sin_cache", "expected cos_cache and sin_cache with do_rotary = 1"),
        ("k_norm_weight", "expected both q_norm_weight and k_norm_weight or neither"),
    ],
)
def test_missing_input_is_refused(missing: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Node("FlowQKVAttention", call(**{missing: None}), ("float",) * 3, do_rotary=1, **SIZES)


@pytest.mark.parametrize("port", contract_of("FlowQKVAttention").inputs, ids=lambda port: port.name)
def test_type_that_input_does_not_take_is_refused(port: Any) -> None:
    given = call()[input_names("FlowQKVAttention").index(port.name)]
    assert given is not None
    with pytest.raises(ValueError, match=rf"{port.name}.* {port.types[0]}.*got uint8"):
        Node("FlowQKVAttention", call(**{port.name: given.astype(np.uint8)}), ("float",) * 3, do_rotary=1, **SIZES)


@pytest.mark.parametrize("name", ["past_value", "present"])
def test_caches_of_several_types_are_refused(name: str) -> None:
    changed = {name: zeros(B, G, CAPACITY, D, dtype=np.float16)} if name == "past_value" else {}
    present = "float" if changed else "float16"
    with pytest.raises(ValueError, match=f"{name}.* float, .*got float16"):
        Node("FlowQKVAttention", call(**changed), ("float", present, present), do_rotary=1, **SIZES)


def test_output_of_other_type_is_refused() -> None:
    with pytest.raises(ValueError, match=r"output.* float, got float16"):
        Node("FlowQKVAttention", call(), ("float16", "float", "float"), **SIZES)


def test_inputs_all_present_are_taken() -> None:
    assert infer(call()) == [[B, S, H * D], [B, G, CAPACITY, D], [B, G, CAPACITY, D]]
    # seqlens_k as a Cast of a ReduceSum with keepdims makes it, and a total with an axis.
    also = {"seqlens_k": np.array([[7], [6]], np.int32), "total_sequence_length": np.array([TOTAL], np.int32)}
    assert infer(call(**also)) == infer(call())


# Each of these would be read past its end if its shape were not checked.
SHAPES: dict[str, tuple[Inputs, str]] = {
    "query: width": ({"query": zeros(B, S, H * D - 1)}, r"query .*, got \[2,3,255\]"),
    "query: rank": ({"query": zeros(S, H * D)}, r"query.*, got \[3,256\]"),
    "key: tokens": ({"key": zeros(B, S - 1, G * D)}, r"key.*, got \[2,2,128\]"),
    "key: batch": ({"key": zeros(1, S, G * D)}, r"key.*, got \[1,3,128\]"),
    "key and value: width": ({"key": zeros(B, S, D), "value": zeros(B, S, D)}, r"key.*, got \[2,3,64\]"),
    "key: rank": ({"key": zeros(B, G, S, D)}, r"key.*, got \[2,2,3,64\]"),
    "value: tokens": ({"value": zeros(B, S - 1, G * D)}, r"value.*, got \[2,2,128\]"),
    "past: heads": (
        {"past_key": zeros(B, 1, CAPACITY, D), "past_value": zeros(B, 1, CAPACITY, D)},
        r"past_key.*, got \[2,1,9,64\]",
    ),
    "past: rank": ({"past_key": zeros(B, G, D)}, r"past_key.*, got \[2,2,64\]"),
    "past: capacities": (
        {"past_value": zeros(B, G, CAPACITY - 1, D)},
        r"past_value.*, got .*\[2,2,8,64\]",
    ),
    "seqlens_k: short": ({"seqlens_k": np.array([7], np.int32)}, r"seqlens_k of shape \[2\], got \[1\]"),
    "seqlens_k: scalar": ({"seqlens_k": np.array(7, np.int32)}, r"seqlens_k of shape \[2\], got \[\]"),
    "total_sequence_length: empty": (
        {"total_sequence_length": zeros(0, dtype=np.int32)},
        r"one number in total_sequence_length, got shape \[0\]",
    ),
    "total_sequence_length: two": (
        {"total_sequence_length": np.array([8, 8], np.int32)},
        r"one number in total_sequence_length, got shape \[2\]",
    ),
    "cos_cache: wide": (
        {"cos_cache": zeros(10, D), "sin_cache": zeros(10, D)},
        r"cos_cache and sin_cache of shape \[positions, at most 32\], got \[10,64\] and \[10,64\]",
    ),
    "cos_cache: rank": (
        {"cos_cache": zeros(10), "sin_cache": zeros(10)},
        r"cos_cache.*, got \[10\]",
    ),
    "sin_cache: rows": ({"sin_cache": zeros(1, D // 2)}, r"sin_cache.*, got .*\[1,32\]"),
    "sin_cache: width": ({"sin_cache": zeros(10, 1)}, r"sin_cache.*, got .*\[10,1\]"),
    "position_ids: short": (
        {"position_ids": zeros(B, 1, dtype=np.int64)},
        r"position_ids of shape \[2,3\], got \[2,1\]",
    ),
    "position_ids: batch": (
        {"position_ids": zeros(1, S, dtype=np.int64)},
        r"position_ids of shape \[2,3\], got \[1,3\]",
    ),
    "position_ids: rank": ({"position_ids": zeros(S, dtype=np.int64)}, r"position_ids of shape \[2,3\], got \[3\]"),
    "position_ids: long": (
        {"position_ids": zeros(B, S + 1, dtype=np.int64)},
        r"position_ids of shape \[2,3\], got \[2,4\]: give as many as there are tokens",
    ),
    "attention_bias: keys": (
        {"attention_bias": zeros(1, 1, S, TOTAL - 1)},
        r"attention_bias of shape \[1 or 2, 1 or 4, 3, at least 8\], got \[1,1,3,7\]",
    ),
    "attention_bias: tokens": ({"attention_bias": zeros(1, 1, 1, TOTAL)}, r"attention_bias .*, got \[1,1,1,8\]"),
    "attention_bias: heads": ({"attention_bias": zeros(1, 2, S, TOTAL)}, r"attention_bias .*, got \[1,2,3,8\]"),
    "attention_bias: rank": ({"attention_bias": zeros(S, TOTAL)}, r"attention_bias.*, got \[3,8\]"),
    "q_norm_weight": ({"q_norm_weight": zeros(1)}, r"q_norm_weight of shape \[64\], got \[1\]"),
    "k_norm_weight": ({"k_norm_weight": zeros(D - 1)}, r"k_norm_weight of shape \[64\], got \[63\]"),
    "bidirectional_blocks": (
        {"bidirectional_blocks": zeros(B, S - 1, dtype=np.int32)},
        r"bidirectional_blocks.*, got \[2,2\]",
    ),
    "head_sink": ({"head_sink": zeros(H - 1)}, r"head_sink of shape \[4\], got \[3\]"),
}


@pytest.mark.parametrize("case", SHAPES.values(), ids=SHAPES)
def test_unfit_shapes_are_refused(case: tuple[Inputs, str]) -> None:
    changed, message = case
    with pytest.raises(ValueError, match=message):
        infer(call(**changed))


LEAST, MOST = -(2**31), 2**31 - 1


@pytest.mark.parametrize(
    ("total", "lengths", "message"),
    [
        (-1, [7, 6], "expected total_sequence_length between 0 and 12, got -1"),
        (LEAST, [7, 6], "expected total_sequence_length between 0 and 12, got -2147483648"),
        (13, [7, 6], "expected total_sequence_length between 0 and 12, got 13"),
        (MOST, [7, 6], "expected total_sequence_length between 0 and 12, got 2147483647"),
        (8, [7, -1], r"expected seqlens_k \+ 1 of row 1 to be at least 3, got 0"),
        (8, [LEAST, 6], r"expected seqlens_k \+ 1 of row 0 to be at least 3, got -2147483647"),
        (8, [7, 1], r"expected seqlens_k \+ 1 of row 1 to be at least 3, got 2"),
        (8, [8, 6], r"expected seqlens_k \+ 1 of row 0 to be at most total_sequence_length = 8, got 9"),
        (8, [7, MOST], "expected a past of at least 2147483645 positions, got 9"),
        # A first prompt.
        (3, [2, 3], r"expected seqlens_k \+ 1 of row 1 to be at most total_sequence_length = 3, got 4"),
        (3, [-2, 2], r"expected seqlens_k \+ 1 of row 0 to be at least 0, got -1"),
    ],
)
def test_unfit_lengths_are_refused(total: int, lengths: list[int], message: str) -> None:
    changed = {"total_sequence_length": np.array(total, np.int32), "seqlens_k": np.array(lengths, np.int32)}
    with pytest.raises(ValueError, match=message):
        infer(call(**changed, attention_bias=None))


@pytest.mark.parametrize("position", [-1, 10, -(2**63), 2**63 - 1])
@pytest.mark.parametrize("counted", [0, 1])
@pytest.mark.parametrize("total", [S, TOTAL])
def test_positions_without_angles_are_refused(position: int, counted: int, total: int) -> None:
    ids = np.zeros((B, S), np.int64)
    ids[0, 0] = position
    changed = {"position_ids": ids, "total_sequence_length": np.array(total, np.int32), "attention_bias": None}
    changed["seqlens_k"] = np.array([total - 1, total - 1], np.int32)
    with pytest.raises(ValueError, match=r"expected positions below 10, .*: shorten the context"):
        infer(call(**changed), counted_prompt=counted)


def test_positions_beyond_angles_are_refused() -> None:
    first_prompt = {"total_sequence_length": np.array(S, np.int32), "seqlens_k": np.array([S - 1] * B, np.int32)}
    with pytest.raises(ValueError, match=r"expected positions below 10, .*, got 10: shorten the context"):
        infer(call(**first_prompt, position_ids=np.full((B, S), 8), attention_bias=None), counted_prompt=1)
    changed = {"position_ids": None, "cos_cache": rope_tables(7)[0], "sin_cache": rope_tables(7)[1]}
    with pytest.raises(ValueError, match=r"expected positions below 7, .*, got 7: shorten the context"):
        infer(call(**changed))


def test_window_sized_cache_below_window_is_refused() -> None:
    with pytest.raises(ValueError, match=r"a window-sized KV cache of at least 16 positions, got 9"):
        infer(
            call(total_sequence_length=np.array(12, np.int32), attention_bias=None),
            local_window_size=16,
            sliding_window_cache=1,
        )


def test_sizes_that_no_memory_has_are_refused() -> None:
    """An array with a size of 0 is empty, but memory is planned by its other sizes."""
    for batch, tokens in ((2**40, 0), (0, 2**40)):
        with pytest.raises(ValueError, match=r"a query and a KV cache of at most 128 TiB each"):
            run("FlowQKVAttention", [np.empty((batch, tokens, WIDTH), np.float32)], **SIZES)
    past = np.empty((0, G, 2**32, D), np.float32)
    lengths = [zeros(0, dtype=np.int32), np.array(1, np.int32)]
    with pytest.raises(ValueError, match=r"past_key and past_value of shape \[0,2,\?,64\], got \[0,2,4294967296,64\]"):
        run("FlowQKVAttention", [zeros(0, 1, WIDTH), None, None, past, past, *lengths], **SIZES)
