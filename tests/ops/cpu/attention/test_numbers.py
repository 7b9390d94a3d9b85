# SPDX-License-Identifier: Apache-2.0
"""FlowQKVAttention and FlowKVAttention on the CPU, for every instruction set of this machine, against float64."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.ops.cpu.attention.conversation import (
    ATTENTION_ISAS,
    CACHE_TYPES,
    EPSILON,
    PAIRS_EPSILON,
    PAIRS_EXP,
    SIZES,
    WORDS_EPSILON,
    Conversation,
    D,
    G,
    H,
    blocks_of,
    loaded,
    multiplies_pairs,
    rounds_by_rows,
    stored,
)
from tests.ops.device import Node, run
from tests.pairwise import pairwise


@pytest.mark.parametrize("isa", ATTENTION_ISAS)
@pytest.mark.parametrize("cache", CACHE_TYPES)
@pytest.mark.parametrize("capacity", [0, 96])
@pytest.mark.parametrize("window", [-1, 16])
def test_prefill_decode_and_second_turn_equal_float64(isa: str, cache: str, capacity: int, window: int) -> None:
    talk = Conversation(capacity=capacity, cache=cache, isa=isa, norm=True, local_window_size=window)
    for tokens in (37, 1, 1, 20, 1):
        talk.turn(tokens)


@pytest.mark.parametrize("isa", ATTENTION_ISAS)
@pytest.mark.parametrize("cache", CACHE_TYPES)
@pytest.mark.parametrize("heads", [(1, 1, 8), (3, 1, 72), (8, 2, 40), (6, 2, 80), (4, 4, 256), (40, 1, 16), (5, 1, 33)])
def test_head_counts_and_sizes_equal_float64(isa: str, cache: str, heads: tuple[int, int, int]) -> None:
    """Sizes that fill no whole vector or are odd; one to many heads a group; few and many rows; one to four vectors."""
    talk = Conversation(capacity=0, isa=isa, cache=cache, heads=heads, rotary=heads[2] % 2 == 0)
    for tokens in (5, 1, 70, 9, 13):
        talk.turn(tokens)


@pytest.mark.parametrize(("isa", "cache", "window"), pairwise(ATTENTION_ISAS, ["float", "bfloat16", "int8"], [-1, 300]))
def test_long_cache_merged_from_parts_equals_float64(isa: str, cache: str, window: int) -> None:
    """One and several queries on top of a past that is several parts of keys long."""
    talk = Conversation(capacity=0, isa=isa, cache=cache, rotary=False, heads=(2, 1, 256), local_window_size=window)
    talk.remember(1200)
    for tokens in (1, 3, 40, 1):
        talk.turn(tokens)


@pytest.mark.slow
@pytest.mark.parametrize(("isa", "cache", "window"), pairwise(ATTENTION_ISAS, ["float", "bfloat16", "int8"], [-1, 300]))
def test_long_prompt_equals_float64(isa: str, cache: str, window: int) -> None:
    """Every tile of queries over all the keys before it; test_blocks.py has prompts of 250 and 600 tokens."""
    talk = Conversation(capacity=0, isa=isa, cache=cache, rotary=False, heads=(2, 1, 256), local_window_size=window)
    talk.turn(700)


def test_parts_are_merged_in_one_order() -> None:
    """7 parts of 128 KB or more of each head, on more threads than some machines have."""
    rng = np.random.default_rng(5)
    past = rng.standard_normal((2, 1, G, 2000, D), dtype=np.float32)
    query = rng.standard_normal((1, 1, (H + 2 * G) * D), dtype=np.float32)
    inputs = [query, None, None, past[0], past[1], np.array([1999], np.int32), np.array(2000, np.int32)]
    node = Node("FlowKVAttention", inputs, ("float", "float", "float"), options={"threads": "5"}, **SIZES)
    first, *_ = node(*inputs)
    for _ in range(50):
        np.testing.assert_array_equal(node(*inputs)[0], first)


@pytest.mark.slow  # numbers alone, because the other tests here read and write the same memory
@pytest.mark.parametrize(
    ("isa", "cache", "tokens", "softcap"), pairwise(ATTENTION_ISAS, [*CACHE_TYPES], [1, 63], [0.0, 2.0])
)
def test_rounding_of_queries_and_weights_is_within_bounds(isa: str, cache: str, tokens: int, softcap: float) -> None:
    """Against float64 on the values that are multiplied.

    In pairs of bf16 a query times scale and log2 e is rounded, here as there; so are the probabilities, by a relative
    u of half an ulp and the exponential's error. As they are divided by the sum of the rounded ones, an output is off
    by at most u sum(p |v - output|), not by u max|v|: the values are far from 0 to tell the two apart. In float32 there
    are only the roundings that `Conversation.tolerance` counts.
    """
    rng = np.random.default_rng(4)
    total = 499
    past = total - tokens
    query = rng.standard_normal((1, tokens, (H + 2 * G) * D), dtype=np.float32)
    query[..., -G * D :] += 4
    keys, values = (rng.standard_normal((1, G, past, D), dtype=np.float32) + mean for mean in (0, 4))
    bias = rng.standard_normal((1, H, tokens, total), dtype=np.float32) if softcap else None
    inputs = [query, None, None, *(stored(array, cache) for array in (keys, values))]
    inputs += [np.array([total - 1], np.int32), np.array(total, np.int32), None, None, None, bias]
    sizes = {"num_heads": H, "kv_num_heads": G, "head_size": D, "softcap": softcap}
    options = {"cpu_isa": isa, "threads": "2"}
    output, keys, values = run("FlowQKVAttention", inputs, outputs=("float", cache, cache), options=options, **sizes)
    assert output is not None
    assert keys is not None
    assert values is not None
    unit = np.float32(1.44269504)

    def is_within_bound(head: int, *, pairs: bool) -> np.ndarray:
        q = query[0, :, head * D : (head + 1) * D] * np.float32(D**-0.5)
        q = (q * unit).astype(ml_dtypes.bfloat16).astype(np.float64) / unit if pairs else q.astype(np.float64)
        k, v = (loaded(array[0, head * G // H]) for array in (keys, values))
        if pairs:  # int8's are rounded; those of a bf16 cache are bf16 already
            k, v = (array.astype(ml_dtypes.bfloat16).astype(np.float64) for array in (k, v))
        scores = q @ k.T
        if bias is not None:
            scores = softcap * np.tanh(scores / softcap) + bias[0, head]
        scores[np.arange(total)[None] > past + np.arange(tokens)[:, None]] = -np.inf
        p = np.exp(scores - scores.max(-1, keepdims=True))
        p /= p.sum(-1, keepdims=True)
        expected = p @ v
        # [tokens, d]: how far the values of the keys lie from the output, by their weights.
        spread = np.stack([weights @ np.abs(v - out) for weights, out in zip(p, expected, strict=True)])
        score_error = (D + 32) * EPSILON * (np.abs(q) @ np.abs(k).T).max()
        bound = (2 * score_error + (total + 32) * EPSILON) * np.abs(v).max()
        if pairs:
            bound = bound + (PAIRS_EPSILON + PAIRS_EXP) * spread
        elif cache == "int8" and tokens == 1:
            # A query's elements, and a key's factor times its scale, are off by half a step each; times codes of up to
            # 127 that moves the output by no more than the same share of max|v|.
            words = 2 * np.abs(q).max() * np.abs(k).sum(-1).max() + total * p.max()
            bound = bound + WORDS_EPSILON * words * np.abs(v).max()
        close: np.ndarray = np.abs(output[0, :, head * D : (head + 1) * D] - expected) <= bound
        return close

    pairs = multiplies_pairs(cache, isa) and tokens > 1
    for head in range(H):
        close = is_within_bound(head, pairs=pairs)
        if rounds_by_rows(cache, isa):
            close |= is_within_bound(head, pairs=False)
        assert close.all()


@pytest.mark.parametrize("isa", ATTENTION_ISAS)
@pytest.mark.parametrize("cache", CACHE_TYPES)
@pytest.mark.parametrize("attributes", [{}, {"local_window_size": 16}, {"softcap": 2.0}])
def test_head_sink_equals_float64(isa: str, cache: str, attributes: dict[str, Any]) -> None:
    talk = Conversation(capacity=96, cache=cache, isa=isa, norm=True, sink=True, **attributes)
    for tokens in (37, 1, 3):
        talk.turn(tokens)
    talk.turn(20, blocks=blocks_of([(1, 12), (2, 8)]))


@pytest.mark.parametrize("isa", ATTENTION_ISAS)
def test_head_sink_is_added_once_to_parts(isa: str) -> None:
    talk = Conversation(capacity=0, isa=isa, cache="bfloat16", rotary=False, heads=(2, 1, 256), sink=True)
    talk.remember(1200)
    for tokens in (1, 3):
        talk.turn(tokens)


@pytest.mark.parametrize("isa", ATTENTION_ISAS)
@pytest.mark.parametrize("cache", CACHE_TYPES)
@pytest.mark.parametrize("tokens", [1, 40, 200])
def test_query_with_all_keys_masked_by_lowest_float_weighs_them_equally(isa: str, cache: str, tokens: int) -> None:
    """A masked query's scores are all the lowest float, whatever is added, and softmax gives equal weights.

    The masked queries' outputs are the values' mean. The tolerance is PAIRS_EPSILON for the probabilities, as much for
    their sum, and as much for int8 values, which are rounded to bf16. The other queries have the same bits as without
    the mask.
    """
    rng = np.random.default_rng(5)
    query = rng.standard_normal((1, tokens, (H + 2 * G) * D), dtype=np.float32)
    bias = np.zeros((1, 1, tokens, tokens), np.float32)
    masked = np.arange(tokens) % 3 == 0
    inputs = [query, *[None] * 9, bias]
    sizes = {"num_heads": H, "kv_num_heads": G, "head_size": D, "causal": 0}
    options = {"cpu_isa": isa, "threads": "2"}
    inputs[3:5] = [stored(np.zeros((1, G, 0, D)), cache) for _ in range(2)]
    node = Node("FlowQKVAttention", inputs, ("float", cache, cache), options=options, **sizes)
    plain, *_ = node(*inputs)
    bias[:, :, masked] = np.finfo(np.float32).min
    output, _, values = node(*inputs)
    assert output is not None
    assert plain is not None
    assert values is not None
    v = np.repeat(loaded(values[0]), H // G, axis=0)
    error = np.abs(output[0, masked].reshape(-1, H, D) - v.mean(1))
    weight = 2 * PAIRS_EPSILON if multiplies_pairs(cache, isa) and tokens > 1 else (tokens + 4) * EPSILON
    if cache == "int8":
        weight += PAIRS_EPSILON if weight > PAIRS_EPSILON else 2 * WORDS_EPSILON
    assert np.all(error <= weight * np.abs(v).mean(1))
    np.testing.assert_array_equal(output[0, ~masked], plain[0, ~masked])


def test_flow_kv_attention_is_same_for_one_token() -> None:
    with pytest.raises(ValueError, match=r"expected one token, got 2"):
        run(
            "FlowKVAttention",
            [np.zeros((1, 2, (H + 2 * G) * D), np.float32)],
            outputs=("float", "", ""),
            **SIZES,
        )


@pytest.mark.parametrize("isa", ATTENTION_ISAS)
@pytest.mark.parametrize("heads", [(4, 1, 256), (6, 2, 64), (2, 2, 64)])
@pytest.mark.parametrize("tokens", [2, 4])
def test_few_tokens_have_bits_of_single_steps(isa: str, heads: tuple[int, int, int], tokens: int) -> None:
    """The bits are the same, though the windows of tokens that are computed together begin at different keys."""
    outputs = []
    for calls in ([tokens], [1] * tokens):
        conversation = Conversation(capacity=128, cache="bfloat16", isa=isa, heads=heads, local_window_size=40)
        conversation.turn(60)
        # The same numbers for any cut into calls.
        conversation.rng = np.random.default_rng(1)
        outputs.append(np.concatenate([conversation.turn(each) for each in calls], axis=1))
    np.testing.assert_array_equal(*outputs)
