# SPDX-License-Identifier: Apache-2.0
"""FlowQKVAttention and FlowKVAttention on the CPU, for every instruction set of this machine, against float64."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from flownpu.ops.definitions import flow_qkv_attention
from flownpu.ops.definitions.int8_cache import dequantise_rows, quantise_rows
from tests.ops.device import ISAS, Node, run

EPSILON = 2.0**-24
CACHE_TYPES = {"float": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "int8": np.int8}
# Half an ulp, relative: what rounding to the cache's type may change when float32 and float64 round apart.
# That of int8 is relative to the largest of a row.
CACHE_EPSILON = {"float": EPSILON, "bfloat16": 2.0**-8, "float16": 2.0**-11, "int8": 1 / 254}
# A query, or a chunk's factors, in steps of a 32767th of the largest, where few queries look into an int8 cache: half.
WORDS_EPSILON = 0.5 / 32767
H, G, D = 4, 2, 64
SIZES = {"num_heads": H, "kv_num_heads": G, "head_size": D}
# Where several queries look into a bf16 cache with AVX-512, queries and probabilities are rounded to bf16: half an ulp.
PAIRS_EPSILON = 2.0**-9
# And e^x is a polynomial whose relative error was made least.
PAIRS_EXP = 2.7e-6


def multiplies_pairs(cache: str, isa: str) -> bool:
    return cache in ("bfloat16", "int8") and isa == "avx512"


def stored(rows: np.ndarray, cache: str) -> np.ndarray:
    """Rows [.., d] as a cache of that type has them."""
    return quantise_rows(rows) if cache == "int8" else rows.astype(CACHE_TYPES[cache])


def loaded(cache: np.ndarray) -> np.ndarray:
    """What a cache stands for, in float64."""
    return (dequantise_rows(cache) if cache.dtype == np.int8 else cache).astype(np.float64)


def rope_tables(positions: int = 512, head_size: int = D) -> tuple[np.ndarray, np.ndarray]:
    angles = np.outer(np.arange(positions), 10000.0 ** (-np.arange(0, head_size, 2) / head_size))
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


class Conversation:
    """Calls the operator turn after turn on one cache, and compares every turn with the reference.

    Args:
        lengths: capacity of the shared cache; 0: a growing cache, past and present apart.
        attributes: of the node, beside the head counts.
    """

    def __init__(
        self,
        *,
        capacity: int,
        cache: str = "float",
        isa: str = ISAS[0],
        batch: int = 1,
        rotary: bool = True,
        norm: bool = False,
        sink: bool = False,
        heads: tuple[int, int, int] = (H, G, D),
        seed: int = 0,
        **attributes: Any,
    ) -> None:
        self.rng = np.random.default_rng(seed)
        self.cache, self.isa, self.batch, self.capacity = cache, isa, batch, capacity
        h, g, d = self.heads = heads
        self.attributes = {
            "num_heads": h,
            "kv_num_heads": g,
            "head_size": d,
            "do_rotary": int(rotary),
            **attributes,
        }
        self.tables = rope_tables(head_size=d) if rotary else (None, None)
        weights = self.rng.uniform(0.5, 1.5, (2, d)).astype(np.float32)
        self.norms = (weights[0], weights[1]) if norm else (None, None)
        # Sinks of the size of scores, far above and far below them.
        self.sinks = np.resize(np.array([0.5, 200, -200, 3], np.float32), h) if sink else None
        shape = (batch, g, capacity, d)
        self.past = [stored(np.zeros(shape), cache) for _ in range(2)]
        self.lengths = np.zeros(batch, np.int64)
        # The longest key so far.
        self.key_norm = 0.0

    def inputs(
        self,
        query: np.ndarray,
        total: int,
        lengths: np.ndarray,
        past: list[np.ndarray],
        blocks: np.ndarray | None = None,
    ) -> list[np.ndarray | None]:
        return [
            query,
            None,
            None,
            *past,
            (lengths - 1).astype(np.int32),
            np.array(total, np.int32),
            *self.tables,
            None,
            None,
            *self.norms,
            blocks,
            self.sinks,
        ]

    def turn(self, tokens: int, lengths: list[int] | None = None, blocks: np.ndarray | None = None) -> np.ndarray:
        """Feeds `tokens` tokens to each row.

        Args:
            tokens: S.
            lengths: the rows' totals after a ragged first prompt.
            blocks: bidirectional_blocks [batch, tokens].
        """
        h, g, d = self.heads
        self.lengths = self.lengths + tokens if lengths is None else np.array(lengths)
        first = self.past[0].shape[2] == 0 or not self.lengths.max() > tokens
        total = tokens if first else int(self.lengths.max())
        query = self.rng.standard_normal((self.batch, tokens, (h + 2 * g) * d), dtype=np.float32)
        inputs = self.inputs(query, total, self.lengths, self.past, blocks)
        expected, *expected_present = flow_qkv_attention.reference(*inputs, **self.attributes)
        node = Node(
            "FlowQKVAttention",
            inputs,
            ("float", self.cache, self.cache),
            options={"cpu_isa": self.isa},
            **self.attributes,
        )
        into = {1: self.past[0], 2: self.past[1]} if self.capacity else {}
        output, *present = node(*inputs, into=into)
        assert output is not None
        for b in range(self.batch):
            valid = tokens if lengths is None else lengths[b]
            error = np.abs(output[b, :valid] - expected[b, :valid])
            assert error.max() <= self.tolerance(query, total), (b, error.max(), self.tolerance(query, total))
        self.check_present(present, expected_present)
        self.past = [array for array in present if array is not None]
        return output

    def tolerance(self, query: np.ndarray, keys: int) -> float:
        """Bound on the error of an output.

        A score's error ds moves the output by at most 2 ds max|v| (softmax); sums over the keys add keys + 32
        roundings of max|v| (32: exp, rescaling and merging). A score sums d products, after some 16 roundings in norm
        and RoPE: relative to the sum of the products' magnitudes, which is at most |q| |k|. In pairs of bf16 each
        product of a score is off by half an ulp of the query, and each probability by as much and by the
        exponential's error, in the numerator and in the denominator. Where rounding to the cache's type falls the
        other way, which happens to one element in thousands (two in a key are allowed for), a key's or value's
        element is off by an ulp. int8 rounds queries and weights as FewInt8 (few_int8.h) says, where few look.
        """
        h, g, d = self.heads
        scale = self.attributes.get("scale", 0.0) or d**-0.5
        largest = float(np.abs(query).max()) * 1.5**0.5
        norms = np.linalg.norm(query.reshape(-1, h + 2 * g, d), axis=-1)
        self.key_norm = max(self.key_norm, float(norms[:, h : h + g].max()))
        norm = float(norms[:, :h].max()) * self.key_norm
        if self.norms[0] is not None:
            # A normed head has norm sqrt(d) before its weights, of at most 1.5.
            largest, norm = 1.5 * d**0.5, 1.5**2 * d
        flips = 0.0 if self.cache == "float" else 4 * CACHE_EPSILON[self.cache]
        score = scale * ((d + 32) * EPSILON * norm + flips * largest * largest)
        weight = (keys + 32) * EPSILON
        if multiplies_pairs(self.cache, self.isa) and query.shape[1] > 1:
            score += scale * PAIRS_EPSILON * norm
            weight += 2 * (PAIRS_EPSILON + PAIRS_EXP)
            if self.cache == "int8":  # whose keys and values are rounded to bf16 as well
                score += scale * PAIRS_EPSILON * norm
                weight += PAIRS_EPSILON
        elif self.cache == "int8":
            score += scale * WORDS_EPSILON * float(np.sqrt(d)) * norm
            # A sum of at most `keys` factors, each off by that of the largest.
            weight += WORDS_EPSILON * keys
        return float(np.abs(query).max()) * (2 * score + weight + flips)

    def check_present(self, present: list[np.ndarray | None], expected: list[np.ndarray]) -> None:
        for ours, theirs in zip(present, expected, strict=True):
            assert ours is not None
            assert ours.dtype == theirs.dtype
            assert ours.shape == theirs.shape
            for b, length in enumerate(self.lengths):
                kept = int(length)
                if self.attributes.get("sliding_window_cache"):
                    kept = flow_qkv_attention.resident_tokens(kept, ours.shape[2], self.attributes["local_window_size"])
                a, e = (loaded(x[b, :, :kept]) for x in (ours, theirs))
                # RoPE and norm: some 16 roundings of the largest element; then at most one ulp of the cache's type,
                # which of int8 is a code, and a bit of bf16 of the scale.
                ulp = 2 * CACHE_EPSILON[self.cache] * np.abs(e)
                if self.cache == "int8":
                    ulp = (2 * CACHE_EPSILON["int8"] + 2.0**-8) * np.abs(e).max(-1, initial=0, keepdims=True)
                bound = 16 * EPSILON * np.abs(e).max(initial=0) + ulp
                assert np.all(np.abs(a - e) <= bound)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("cache", CACHE_TYPES)
@pytest.mark.parametrize("capacity", [0, 96])
@pytest.mark.parametrize("window", [-1, 16])
def test_prefill_decode_and_a_second_turn(isa: str, cache: str, capacity: int, window: int) -> None:
    talk = Conversation(capacity=capacity, cache=cache, isa=isa, norm=True, local_window_size=window)
    for tokens in (37, 1, 1, 20, 1):
        talk.turn(tokens)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("cache", CACHE_TYPES)
@pytest.mark.parametrize("heads", [(1, 1, 8), (3, 1, 72), (8, 2, 40), (6, 2, 80), (4, 4, 256), (40, 1, 16), (5, 1, 33)])
def test_head_counts_and_sizes(isa: str, cache: str, heads: tuple[int, int, int]) -> None:
    """Sizes that fill no vector or are odd, single and many heads a group: few and many rows, one to four vectors."""
    talk = Conversation(capacity=0, isa=isa, cache=cache, heads=heads, rotary=heads[2] % 2 == 0)
    for tokens in (5, 1, 70, 9, 13):
        talk.turn(tokens)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("cache", ["float", "bfloat16", "int8"])
@pytest.mark.parametrize("window", [-1, 300])
def test_a_long_cache_is_merged_from_parts(isa: str, cache: str, window: int) -> None:
    """One and several queries on top of a past that is several parts of keys long."""
    talk = Conversation(capacity=0, isa=isa, cache=cache, rotary=False, heads=(2, 1, 256), local_window_size=window)
    for tokens in (1200, 1, 3, 40, 1):
        talk.turn(tokens)


def test_parts_are_merged_in_one_order_whoever_does_them() -> None:
    """7 parts of 128 KB or more of each head, on more threads than some machines have."""
    rng = np.random.default_rng(5)
    past = rng.standard_normal((2, 1, G, 2000, D), dtype=np.float32)
    query = rng.standard_normal((1, 1, (H + 2 * G) * D), dtype=np.float32)
    inputs = [query, None, None, past[0], past[1], np.array([1999], np.int32), np.array(2000, np.int32)]
    node = Node("FlowKVAttention", inputs, ("float", "float", "float"), options={"threads": "5"}, **SIZES)
    first, *_ = node(*inputs)
    for _ in range(50):
        np.testing.assert_array_equal(node(*inputs)[0], first)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("cache", CACHE_TYPES)
@pytest.mark.parametrize("tokens", [1, 63])
@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_what_is_rounded(isa: str, cache: str, tokens: int, softcap: float) -> None:
    """Against float64 on the values that are multiplied.

    In pairs of bf16 a query times scale and log2 e is rounded, here as there; so are the probabilities, by a relative
    u of half an ulp and the exponential's error. As what they are divided by is the sum of the rounded ones, an output
    is off by at most u sum(p |v - output|), not by u max|v|: the values are far from 0 to tell the two apart. In
    float32 what is left are the roundings that `Conversation.tolerance` counts.
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
    pairs = multiplies_pairs(cache, isa) and tokens > 1
    unit = np.float32(1.44269504)
    for head in range(H):
        q = query[0, :, head * D : (head + 1) * D] * np.float32(D**-0.5)
        q = (q * unit).astype(ml_dtypes.bfloat16).astype(np.float64) / unit if pairs else q.astype(np.float64)
        k, v = (loaded(array[0, head * G // H]) for array in (keys, values))
        if pairs:  # of int8; a bf16 cache is so
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
            # A query's elements, and a key's factor times its scale, are off by half a step each: of codes up to 127,
            # no more than of max|v|.
            words = 2 * np.abs(q).max() * np.abs(k).sum(-1).max() + total * p.max()
            bound = bound + WORDS_EPSILON * words * np.abs(v).max()
        assert np.all(np.abs(output[0, :, head * D : (head + 1) * D] - expected) <= bound)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("cache", ["float", "bfloat16", "int8"])
@pytest.mark.parametrize("attributes", [{"softcap": 5.0}, {"scale": 0.5}, {"rotary_interleaved": 1}, {"causal": 0}])
def test_variants(isa: str, cache: str, attributes: dict[str, Any]) -> None:
    talk = Conversation(capacity=0, isa=isa, cache=cache, **attributes)
    for tokens in (19, 1):
        talk.turn(tokens)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("cache", CACHE_TYPES)
@pytest.mark.parametrize("attributes", [{}, {"local_window_size": 16}, {"softcap": 2.0}])
def test_a_sink_takes_its_share(isa: str, cache: str, attributes: dict[str, Any]) -> None:
    talk = Conversation(capacity=96, cache=cache, isa=isa, norm=True, sink=True, **attributes)
    for tokens in (37, 1, 3):
        talk.turn(tokens)
    talk.turn(20, blocks=blocks_of([(1, 12), (2, 8)]))


@pytest.mark.parametrize("isa", ISAS)
def test_a_sink_is_added_once_to_parts(isa: str) -> None:
    talk = Conversation(capacity=0, isa=isa, cache="bfloat16", rotary=False, heads=(2, 1, 256), sink=True)
    for tokens in (1200, 1, 3):
        talk.turn(tokens)


def blocks_of(*rows: list[tuple[int, int]]) -> np.ndarray:
    """bidirectional_blocks int32 [rows, tokens], each row given as runs of (number, tokens)."""
    return np.stack([np.repeat(*np.array(row, np.int32).T).astype(np.int32) for row in rows])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("cache", CACHE_TYPES)
@pytest.mark.parametrize("attributes", [{}, {"local_window_size": 48}, {"local_window_size": 200}])
def test_blocks_see_ahead(isa: str, cache: str, attributes: dict[str, int]) -> None:
    """Pictures of 100 tokens, one after text and two side by side; before a past, on top of it, and with one token."""
    talk = Conversation(capacity=512, cache=cache, isa=isa, norm=True, **attributes)
    talk.turn(250, blocks=blocks_of([(0, 7), (1, 100), (0, 13), (2, 100), (3, 30)]))
    talk.turn(1, blocks=blocks_of([(1, 1)]))
    talk.turn(130, blocks=blocks_of([(5, 100), (-1, 29), (6, 1)]))
    # So few queries that a kernel of its own attends, and their keys are cut into parts.
    talk.turn(2, blocks=blocks_of([(1, 2)]))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("heads", [(2, 1, 256), (3, 3, 72), (5, 1, 33)])
def test_blocks_of_odd_heads(isa: str, heads: tuple[int, int, int]) -> None:
    talk = Conversation(capacity=0, cache="bfloat16", isa=isa, heads=heads, rotary=False)
    talk.turn(600)
    talk.turn(3, blocks=blocks_of([(0, 1), (1, 2)]))
    talk.turn(67, blocks=blocks_of([(0, 1), (2, 65), (0, 1)]))


@pytest.mark.parametrize("isa", ISAS)
def test_blocks_of_a_ragged_batch(isa: str) -> None:
    """A block that runs into the padding ends with the row."""
    talk = Conversation(capacity=64, batch=3, isa=isa, local_window_size=12)
    talk.turn(20, lengths=[20, 7, 1], blocks=blocks_of([(1, 20)], [(0, 4), (2, 16)], [(3, 10), (4, 10)]))
    talk.turn(1, blocks=blocks_of(*[[(1, 1)]] * 3))


@pytest.mark.parametrize("capacity", [16, 23, 48])
def test_blocks_in_a_window_sized_cache(capacity: int) -> None:
    talk = Conversation(capacity=capacity, local_window_size=16, sliding_window_cache=1)
    talk.turn(40, blocks=blocks_of([(0, 3), (1, 30), (0, 7)]))
    talk.turn(1)
    talk.turn(30, blocks=blocks_of([(1, 20), (2, 10)]))


def test_blocks_change_nothing_where_all_is_seen() -> None:
    talk = Conversation(capacity=0, causal=0)
    talk.turn(19, blocks=blocks_of([(1, 9), (0, 10)]))


def test_blocks_that_do_not_fit_are_refused() -> None:
    query = np.zeros((1, 4, (H + 2 * G) * D), np.float32)
    for blocks, message in (
        (blocks_of([(2, 1), (1, 3)]), "to grow from block to block, got 1 after 2 in row 0"),
        (blocks_of([(1, 1), (0, 2), (1, 1)]), "to grow from block to block, got 1 after 1 in row 0"),
    ):
        with pytest.raises(ValueError, match=message):
            run("FlowQKVAttention", [query, *[None] * 12, blocks], **SIZES)


@pytest.mark.parametrize("capacity", [0, 64])
@pytest.mark.parametrize("cache", ["float", "bfloat16", "int8"])
def test_a_ragged_batch(capacity: int, cache: str) -> None:
    talk = Conversation(capacity=capacity, cache=cache, batch=3, local_window_size=12)
    talk.turn(20, lengths=[20, 7, 1])
    for _ in range(3):
        talk.turn(1)


@pytest.mark.parametrize("capacity", [16, 17, 23, 48])
@pytest.mark.parametrize("turns", [(40, 1, 1, 30, 1), (3, 9, 8, 8, 1, 1, 1, 1), (16, 1, 1), (1,) * 60])
@pytest.mark.parametrize("cache", ["float", "int8"])
def test_a_window_sized_cache(capacity: int, turns: tuple[int, ...], cache: str) -> None:
    """Evicts in steps of C - W + 1, for one token as for prompts longer than the cache."""
    talk = Conversation(capacity=capacity, cache=cache, local_window_size=16, sliding_window_cache=1)
    for tokens in turns:
        talk.turn(tokens)


def test_a_window_sized_cache_may_be_smaller_for_a_sequence_that_fits() -> None:
    """As GenAI allocates it for an answer shorter than the window."""
    talk = Conversation(capacity=12, local_window_size=16, sliding_window_cache=1)
    for tokens in (9, 1, 1, 1):
        talk.turn(tokens)


def test_a_ragged_batch_in_a_window_sized_cache() -> None:
    talk = Conversation(capacity=20, batch=3, local_window_size=16, sliding_window_cache=1)
    talk.turn(50, lengths=[50, 30, 2])
    for _ in range(12):
        talk.turn(1)


@pytest.mark.parametrize("cache", ["float", "int8"])
def test_rewind(cache: str) -> None:
    """Fewer tokens so far than before: what lies behind them in the shared cache no longer counts."""
    talk = Conversation(capacity=64, cache=cache)
    talk.turn(30)
    talk.lengths = np.array([12])
    talk.turn(1)
    talk.lengths = np.array([5])
    talk.turn(9)


def test_separate_query_key_and_value() -> None:
    rng = np.random.default_rng(1)
    q = rng.standard_normal((2, 9, H * D), dtype=np.float32)
    k, v = (rng.standard_normal((2, 9, G * D), dtype=np.float32) for _ in range(2))
    packed = np.concatenate([q, k, v], axis=-1)
    sizes = {"num_heads": H, "kv_num_heads": G, "head_size": D}
    (apart, *_) = run("FlowQKVAttention", [q, k, v], outputs=("float", "", ""), **sizes)
    (together, *_) = run("FlowQKVAttention", [packed], outputs=("float", "", ""), **sizes)
    np.testing.assert_array_equal(apart, together)


@pytest.mark.parametrize("cache", ["float", "bfloat16"])
def test_position_ids_and_attention_bias(cache: str) -> None:
    rng = np.random.default_rng(2)
    tokens = 11
    query = rng.standard_normal((2, tokens, (H + 2 * G) * D), dtype=np.float32)
    ids = rng.integers(0, 500, (2, tokens))
    bias = rng.standard_normal((1, H, tokens, tokens), dtype=np.float32)
    bias[..., 3] = -np.inf
    inputs = [query, *[None] * 6, *rope_tables(), ids, bias]
    sizes = {"num_heads": H, "kv_num_heads": G, "head_size": D, "do_rotary": 1, "causal": 0}
    past = [np.zeros((2, G, 0, D), CACHE_TYPES[cache]) for _ in range(2)]
    inputs[3:5] = past
    output, *_ = run("FlowQKVAttention", inputs, outputs=("float", cache, cache), **sizes)
    expected, *_ = flow_qkv_attention.reference(*inputs, **sizes)
    # As Conversation.tolerance, for this query.
    norms = np.linalg.norm(query.reshape(-1, H + 2 * G, D), axis=-1)
    norm, largest = norms[:, :H].max() * norms[:, H : H + G].max(), float(np.abs(query).max()) * 2**0.5
    flips = 0.0 if cache == "float" else 4 * CACHE_EPSILON[cache]
    pairs = multiplies_pairs(cache, ISAS[0])
    score = ((D + 32) * EPSILON + (PAIRS_EPSILON if pairs else 0)) * norm + flips * largest**2
    weight = (tokens + 32) * EPSILON + (2 * (PAIRS_EPSILON + PAIRS_EXP) if pairs else 0)
    bound = largest * (2 * D**-0.5 * score + weight + flips)
    np.testing.assert_allclose(output, expected, rtol=0, atol=bound)


@pytest.mark.parametrize(("total", "tokens"), [(6, 6), (1, 1), (9, 3), (9, 1)])
@pytest.mark.parametrize("counted", [0, 1])
def test_positions_of_a_prompt_count_on_from_the_first_or_are_given(counted: int, total: int, tokens: int) -> None:
    """Keys as they are stored, which are rotated by their positions, are those of a call that is given all of them."""
    rng = np.random.default_rng(6)
    query = rng.standard_normal((2, tokens, (H + 2 * G) * D), dtype=np.float32)
    past = rng.standard_normal((2, 2, G, 9, D), dtype=np.float32)
    lengths = [np.array([total - 1, total - 1], np.int32), np.array(total, np.int32)]
    given = rng.integers(0, 500, (2, tokens))
    # Any position of a first prompt but the first may be anything.
    meant = given[:1, :1] + np.tile(np.arange(tokens), (2, 1)) if counted and total == tokens else given
    inputs = [query, None, None, *past, *lengths, *rope_tables(), given]
    outputs = run("FlowQKVAttention", inputs, outputs=("float",) * 3, do_rotary=1, counted_prompt=counted, **SIZES)
    inputs[-1] = meant
    expected = run("FlowQKVAttention", inputs, outputs=("float",) * 3, do_rotary=1, **SIZES)
    for ours, theirs in zip(outputs, expected, strict=True):
        assert ours is not None
        assert theirs is not None
        rows = slice(None) if ours.ndim == 3 else slice(total)
        np.testing.assert_array_equal(ours[..., rows, :], theirs[..., rows, :])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("heads", [(2, 2, 5), (4, 2, 64)])
@pytest.mark.parametrize(("batch", "tokens", "total"), [(0, 3, 3), (0, 1, 4), (2, 0, 4), (1, 0, 0), (0, 0, 0)])
def test_no_tokens_and_no_rows(isa: str, heads: tuple[int, int, int], batch: int, tokens: int, total: int) -> None:
    """The cache is kept, and nothing else is there."""
    h, g, d = heads
    past = np.random.default_rng(7).standard_normal((2, batch, g, 4, d), dtype=np.float32)
    inputs = [np.zeros((batch, tokens, (h + 2 * g) * d), np.float32), None, None, *past]
    inputs += [np.full(batch, total - 1, np.int32), np.array(total, np.int32)]
    sizes = {"num_heads": h, "kv_num_heads": g, "head_size": d}
    output, *present = run(
        "FlowQKVAttention", inputs, outputs=("float",) * 3, options={"cpu_isa": isa, "threads": "2"}, **sizes
    )
    assert output is not None
    assert output.shape == (batch, tokens, h * d)
    for kept, before in zip(present, past, strict=True):
        assert kept is not None
        assert kept.shape == (batch, g, 4, d)
        np.testing.assert_array_equal(kept[:, :, :total], before[:, :, :total])


@pytest.mark.parametrize("kept", [1, 2])
def test_half_a_cache_is_written(kept: int) -> None:
    """Where only keys, or only values, are read, they are written like both."""
    query = np.random.default_rng(8).standard_normal((2, 7, (H + 2 * G) * D), dtype=np.float32)
    names = tuple("float" if i in (0, kept) else "" for i in range(3))
    whole = run("FlowQKVAttention", [query], outputs=("float",) * 3, **SIZES)
    half = run("FlowQKVAttention", [query], outputs=names, **SIZES)
    np.testing.assert_array_equal(half[0], whole[0])
    np.testing.assert_array_equal(half[kept], whole[kept])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("cache", CACHE_TYPES)
@pytest.mark.parametrize("tokens", [1, 40, 200])
def test_a_query_whose_keys_are_all_masked_with_the_lowest_float(isa: str, cache: str, tokens: int) -> None:
    """Its scores are then all the lowest float, below which nothing moves them, and softmax gives equal weights.

    The masked queries' outputs are the values' mean; PAIRS_EPSILON each for the probabilities and what they sum to, and
    for int8 values, which are rounded to bf16.
    The others are as they would be without the mask, to the bit.
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


def test_flow_kv_attention_is_the_same_for_one_token() -> None:
    rng = np.random.default_rng(3)
    past = rng.standard_normal((2, 1, G, 300, D), dtype=np.float32)
    query = rng.standard_normal((1, 1, (H + 2 * G) * D), dtype=np.float32)
    lengths = np.array([299], np.int32)
    inputs = [query, None, None, past[0], past[1], lengths, np.array(300, np.int32)]
    sizes = {"num_heads": H, "kv_num_heads": G, "head_size": D}
    prefill = run("FlowQKVAttention", inputs, outputs=("float", "float", "float"), **sizes)
    decode = run("FlowKVAttention", inputs, outputs=("float", "float", "float"), **sizes)
    for a, b in zip(prefill, decode, strict=True):
        np.testing.assert_array_equal(a, b)
    with pytest.raises(ValueError, match=r"expected one token, got 2"):
        run(
            "FlowKVAttention",
            [np.zeros((1, 2, (H + 2 * G) * D), np.float32)],
            outputs=("float", "", ""),
            **sizes,
        )


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("heads", [(4, 1, 256), (6, 2, 64), (2, 2, 64)])
@pytest.mark.parametrize("tokens", [2, 4])
def test_a_few_tokens_are_computed_as_in_single_steps(isa: str, heads: tuple[int, int, int], tokens: int) -> None:
    """In float32, where the attention of a prompt's tokens may round queries and weights to bfloat16."""
    outputs = []
    for calls in ([tokens], [1] * tokens):
        conversation = Conversation(capacity=128, cache="bfloat16", isa=isa, heads=heads, local_window_size=40)
        conversation.turn(60)
        # The same numbers, however the calls are cut.
        conversation.rng = np.random.default_rng(1)
        outputs.append(np.concatenate([conversation.turn(each) for each in calls], axis=1))
    # Rows that are swept together may be summed in another order: of 64 terms, each rounded once.
    np.testing.assert_allclose(*outputs, rtol=0, atol=64 * EPSILON * float(np.abs(outputs[0]).max()))
