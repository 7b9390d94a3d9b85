# SPDX-License-Identifier: Apache-2.0
"""Turns of a conversation through FlowQKVAttention on the CPU, each compared with float64 within a derived bound."""

from typing import Any

import ml_dtypes
import numpy as np

from flownpu.ops.definitions import flow_qkv_attention
from flownpu.ops.definitions.int8_cache import dequantise_rows, quantise_rows
from tests.ops.attention_turns import PAIRS_EPSILON, PAIRS_EXP
from tests.ops.device import ISAS, Node, testing

# Those of ISAS, and "amx", whose attention of 64 and more rows has bits of its own.
ATTENTION_ISAS: list[str] = testing.available_isas()
EPSILON = 2.0**-24
CACHE_TYPES = {"float": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "int8": np.int8}
# Half an ulp, relative: what rounding to the cache's type may change where float32 and float64 round differently.
# That of int8 is relative to the largest of a row.
CACHE_EPSILON = {"float": EPSILON, "bfloat16": 2.0**-8, "float16": 2.0**-11, "int8": 1 / 254}
# Half a step, relative to the largest, of a query or of a chunk's factors, if few queries see an int8 cache.
WORDS_EPSILON = 0.5 / 32767
H, G, D = 4, 2, 64
SIZES = {"num_heads": H, "kv_num_heads": G, "head_size": D}


def multiplies_pairs(cache: str, isa: str) -> bool:
    return cache in ("bfloat16", "int8") and isa in ("amx", "avx512")


def rounds_by_rows(cache: str, isa: str) -> bool:
    """Whether calls of few rows and of many may round differently (select.cc, with_arithmetic): on processors with AMX,
    of which some multiply float32 faster than pairs of bf16."""
    return multiplies_pairs(cache, isa) and "amx" in ATTENTION_ISAS


def stored(rows: np.ndarray, cache: str) -> np.ndarray:
    """Rows [.., d] as a cache of this type stores them."""
    return quantise_rows(rows) if cache == "int8" else rows.astype(CACHE_TYPES[cache])


def loaded(cache: np.ndarray) -> np.ndarray:
    """The numbers in a cache, in float64."""
    return (dequantise_rows(cache) if cache.dtype == np.int8 else cache).astype(np.float64)


def rope_tables(positions: int = 512, head_size: int = D) -> tuple[np.ndarray, np.ndarray]:
    angles = np.outer(np.arange(positions), 10000.0 ** (-np.arange(0, head_size, 2) / head_size))
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def blocks_of(*rows: list[tuple[int, int]]) -> np.ndarray:
    """bidirectional_blocks int32 [rows, tokens], each row given as runs of (number, tokens)."""
    return np.stack([np.repeat(*np.array(row, np.int32).T).astype(np.int32) for row in rows])


class Conversation:
    """Calls the operator turn after turn on one cache, and compares every turn with the reference.

    Args:
        capacity: of the shared cache; 0: a growing cache, past and present apart.
        cache: the cache's type, one of CACHE_TYPES.
        isa: instruction set of the kernels.
        batch: rows.
        rotary: whether there is RoPE.
        norm: whether there is QK-norm.
        sink: whether each head has a sink.
        heads: counts of query heads and KV heads, and the head size.
        seed: of the random numbers.
        attributes: of the node, besides the head counts.
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

    def remember(self, tokens: int) -> None:
        """Puts random keys and values into a growing cache, as those of `tokens` earlier tokens."""
        _, g, d = self.heads
        keys, values = self.rng.standard_normal((2, self.batch, g, tokens, d), dtype=np.float32)
        self.past = [stored(rows, self.cache) for rows in (keys, values)]
        self.lengths = self.lengths + tokens
        self.key_norm = float(np.linalg.norm(keys, axis=-1).max())

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
        element is off by an ulp. int8 rounds queries and weights as FewRowsInt8 (few_rows_int8.h) says, where few look.
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
