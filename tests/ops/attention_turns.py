# SPDX-License-Identifier: Apache-2.0
"""The table of attention's cases for every engine: calls, outputs by softmax over all keys, and bounds."""

import dataclasses
from typing import Any

import ml_dtypes
import numpy as np

BFLOAT16 = ml_dtypes.bfloat16

U = 2.0**-24  # unit roundoff of float32
CACHE_U = {np.dtype(np.float32): U, np.dtype(BFLOAT16): 2.0**-8, np.dtype(np.float16): 2.0**-11}

# Half an ulp of bf16, to which AVX-512 rounds queries and weights of prompts; and the relative error of its e^x.
PAIRS_EPSILON, PAIRS_EXP = 2.0**-9, 2.7e-6

H, G, D = 4, 2, 16
HEADS = {"num_heads": H, "kv_num_heads": G, "head_size": D}


@dataclasses.dataclass
class Turn:
    """One call of the operator in the middle of random conversations, and what it must give.

    Attributes:
        totals: tokens so far of each row of the batch, the new ones included.
        new: S, the new tokens of each row.
        capacity: P of the cache that is fed; without `past` there is none.
        attributes: of the node, besides the head counts.
        packed: one input for queries, keys and values.
        norm: norm weights are given.
        bias: leading shape of an attention bias; none if empty.
        past: a cache is given.
        lengths: seqlens_k and total_sequence_length are given.
        position_ids: are given, and differ from the tokens' positions.
        dtype: the cache's type.
        sink: a score of a key without a value is given for each head, one above and one below all others.
        blocks: of each row of the batch, the block of each new token; none if empty.
    """

    totals: tuple[int, ...]
    new: int
    capacity: int = 0
    attributes: dict[str, Any] = dataclasses.field(default_factory=dict)
    packed: bool = True
    norm: bool = False
    bias: tuple[int, ...] = ()
    past: bool = True
    lengths: bool = True
    position_ids: bool = False
    dtype: Any = np.float32
    blocks: tuple[tuple[int, ...], ...] = ()
    sink: bool = False

    def __post_init__(self) -> None:
        rng = np.random.default_rng(4)
        self.longest = max(self.totals)
        self.pasts = [0 if self.new == self.longest else total - self.new for total in self.totals]
        length = max(past + self.new for past in self.pasts)
        rows = len(self.totals)
        self.q, self.k, self.v = (rng.standard_normal((rows, length, n, D)).astype(np.float32) for n in (H, G, G))
        self.weights = rng.uniform(0.5, 1.5, (2, D)).astype(np.float32)
        angles = np.arange(64)[:, None] * 10000.0 ** (-np.arange(D // 2) / (D // 2))
        self.cos, self.sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
        self.positions = np.tile(np.arange(length), (rows, 1)) + 7 * self.position_ids
        self.addend = rng.standard_normal((*self.bias, self.new, self.longest)).astype(np.float32)
        self.sinks = np.array([0.5, 30, -30, 2], np.float32)
        self.window = self.attributes.get("local_window_size", -1)

    def prepared(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Queries, keys and values of all positions as attention sees them: normalised, rotated, rounded as cached."""
        q, k = self.q.astype(np.float64), self.k.astype(np.float64)
        if self.norm:
            epsilon = self.attributes.get("qk_norm_epsilon", 1e-6)
            q, k = (
                x / np.sqrt((x**2).mean(-1, keepdims=True) + epsilon) * w
                for x, w in zip((q, k), self.weights, strict=True)
            )
        if self.attributes.get("do_rotary"):
            turn = (self.cos + 1j * self.sin)[self.positions][:, :, None]
            q, k = (self.rotated(x, turn) for x in (q, k))
        return q, k.astype(self.dtype).astype(np.float64), self.v.astype(self.dtype).astype(np.float64)

    def rotated(self, x: np.ndarray, turn: np.ndarray) -> np.ndarray:
        """A rotation is a complex product."""
        if self.attributes.get("rotary_interleaved"):
            return (x.copy().view(np.complex128) * turn).view(np.float64)
        product = (x[..., : D // 2] + 1j * x[..., D // 2 :]) * turn
        return np.concatenate([product.real, product.imag], axis=-1)

    def resident(self, tokens: int) -> int:
        """How many tokens the cache holds after `tokens` of them, one at a time."""
        if not self.attributes.get("sliding_window_cache"):
            return tokens
        count = 0
        for _ in range(tokens):
            # A full cache keeps the rest of the next token's window.
            count = self.window if count == self.capacity else count + 1
        return count

    def feeds(self) -> dict[str, np.ndarray]:
        new = [np.stack([x[b, p : p + self.new] for b, p in enumerate(self.pasts)]) for x in (self.q, self.k, self.v)]
        flat = [x.reshape(*x.shape[:2], -1) for x in new]
        given = (
            {"query": np.concatenate(flat, axis=2)}
            if self.packed
            else dict(zip(("query", "key", "value"), flat, strict=True))
        )
        if self.past:
            _, *stored = self.prepared()
            for name, rows in zip(("past_key", "past_value"), stored, strict=True):
                # NaN where nothing may be read.
                given[name] = np.full((len(self.totals), G, self.capacity, D), np.nan, self.dtype)
                for b, past in enumerate(self.pasts):
                    kept = self.resident(past)
                    given[name][b, :, :kept] = rows[b, past - kept : past].swapaxes(0, 1)
        if self.lengths:
            given["seqlens_k"] = np.array(self.totals, np.int32) - 1
            given["total_sequence_length"] = np.array([self.longest], np.int32)
        if self.attributes.get("do_rotary"):
            given |= {"cos_cache": self.cos, "sin_cache": self.sin}
        if self.position_ids:
            given["position_ids"] = np.stack(
                [row[p : p + self.new] for row, p in zip(self.positions, self.pasts, strict=True)]
            )
            if self.attributes.get("counted_prompt") and self.new == self.longest:
                given["position_ids"].flat[1:] = -1  # no valid position: these must not be read
        if self.bias:
            given["attention_bias"] = self.addend
        if self.norm:
            given |= {"q_norm_weight": self.weights[0], "k_norm_weight": self.weights[1]}
        if self.sink:
            given["head_sink"] = self.sinks
        if self.blocks:
            given["bidirectional_blocks"] = np.array(self.blocks, np.int32)
        return given

    def scores(self, b: int, h: int, p: int, visible: list[int]) -> np.ndarray:
        q, k, _ = self.prepared()
        s = np.array([q[b, p, h] @ k[b, j, h * G // H] for j in visible]) * (self.attributes.get("scale") or D**-0.5)
        if softcap := self.attributes.get("softcap"):
            s = softcap * np.tanh(s / softcap)
        if self.bias:
            s += self.addend[b % self.bias[0], h % self.bias[1], p - self.pasts[b], visible]
        return s

    def sees(self, b: int, p: int, j: int) -> bool:
        """Whether the query at position p of row b sees the key at j: transformers' window and (causal or block)."""
        ahead = self.attributes.get("causal") == 0
        if self.blocks and min(p, j) >= self.pasts[b]:
            block, other = (self.blocks[b][position - self.pasts[b]] for position in (p, j))
            ahead |= block == other and block > 0
        return (j <= p or ahead) and (self.window <= 0 or j > p - self.window)

    def expected(self) -> dict[tuple[int, int], np.ndarray]:
        """Softmax over all keys at once: the output [H, d] of each new token (row, index)."""
        *_, v = self.prepared()
        outputs = {}
        for b, (total, past) in enumerate(zip(self.totals, self.pasts, strict=True)):
            for p in range(past, total):
                visible = [j for j in range(total) if self.sees(b, p, j)]
                heads = []
                for h in range(H):
                    weights = np.exp(self.scores(b, h, p, visible))
                    whole = weights.sum() + (np.exp(np.float64(self.sinks[h])) if self.sink else 0)
                    heads.append(weights / whole @ v[b, visible, h * G // H])
                outputs[b, p - past] = np.stack(heads)
        return outputs

    def check(self, outputs: Any, *, is_exact: bool = False, pairs: bool = False) -> None:
        """Compares outputs with `expected`, and the caches with the keys and values that they must hold.

        Args:
            outputs: output, present_key and present_value.
            is_exact: They were computed in float64, with no rounding but that to the cache's type.
            pairs: They were computed with AVX-512, which multiplies prompts over 16-bit numbers in pairs of bf16.
        """
        q, k, v = self.prepared()
        output, *present = outputs
        assert output.shape == (len(self.totals), self.new, H * D)
        # The float64 reference rounds to the cache's type only, as `prepared` does; `bound` is for float32.
        bound = 1e-12 if is_exact else self.bound(q, k, v, pairs=pairs)
        for (b, s), exact in self.expected().items():
            np.testing.assert_allclose(
                output[b, s].reshape(H, D), exact, rtol=0, atol=bound, err_msg=f"row {b}, token {s}"
            )
        capacity = (
            self.capacity
            if self.attributes.get("sliding_window_cache")
            else max(self.capacity * self.past, self.longest)
        )
        for cache, rows in zip(present, (k, v), strict=True):
            assert cache.shape == (len(self.totals), G, capacity, D)
            assert cache.dtype == self.dtype
            for b, total in enumerate(self.totals):
                kept = self.resident(total)
                stored = rows[b, total - kept : total].swapaxes(0, 1)
                # float32 norms and rotations err by a few roundings, which may fall to the other side of a tie.
                slack = 0 if is_exact else 16 * U + 2 * CACHE_U[np.dtype(self.dtype)] * self.changes_keys()
                difference = np.abs(cache[b, :, :kept].astype(np.float64) - stored)
                assert np.all(difference <= slack * np.abs(rows).max())

    def changes_keys(self) -> bool:
        return self.norm or bool(self.attributes.get("do_rotary"))

    def bound(self, q: np.ndarray, k: np.ndarray, v: np.ndarray, *, pairs: bool) -> float:
        """A bound of the float32 error of the output.

        A score is a sum of d products of q and k, a few roundings (16) from exact after norm and rotation;
        where keys are rounded to the cache's type after that, two roundings may fall apart by 2 u of that type. An
        error of delta in each score changes each weight of the softmax by a factor within exp(+-2 delta); summing J
        weights and values, and exp itself, add J + 16 roundings. In pairs of bf16 queries and weights are rounded once
        more; without a cache so are keys and values.
        """
        q_norm, k_norm = (np.linalg.norm(x, axis=-1).max() for x in (q, k))
        relative = (2 * D + 32) * U + (
            2 * CACHE_U[np.dtype(self.dtype)] * self.changes_keys() if self.dtype != np.float32 else 0
        )
        largest = (self.attributes.get("scale") or D**-0.5) * q_norm * k_norm + (
            np.abs(self.addend).max() if self.bias else 0
        )
        weights = (k.shape[1] + 16) * U
        uncached = self.attributes.get("causal") == 0 and not self.past
        if pairs and (uncached or (self.dtype == BFLOAT16 and self.new > 1)):
            relative += PAIRS_EPSILON * (1 + uncached)
            weights += 2 * (PAIRS_EPSILON + PAIRS_EXP) + PAIRS_EPSILON * uncached
        return float((2 * relative * largest + weights) * np.abs(v).max())


WINDOW = {"do_rotary": 1, "local_window_size": 4, "sliding_window_cache": 1}
TURNS = {
    "first prompt": Turn((7,), 7),
    "first prompt, ragged": Turn((7, 4, 1), 7),
    "first prompt, ragged, rotary": Turn((7, 4, 1), 7, 12, {"do_rotary": 1}),
    "first prompt, ragged, shared buffer": Turn((7, 4), 7, 12),
    "first prompt, window": Turn((9, 5), 9, 12, {"local_window_size": 3}),
    "first prompt, bias": Turn((5, 5), 5, 8, bias=(2, 1)),
    "prompt in parts": Turn((11,), 5, 6),
    "prompt in parts, shared buffer": Turn((11,), 5, 20, {"do_rotary": 1}),
    "prompt in parts, window": Turn((11,), 5, 20, {"do_rotary": 1, "local_window_size": 4}),
    "one token": Turn((11, 6, 8), 1, 20),
    "one token, growing": Turn((11,), 1, 10),
    "one token, window": Turn((11, 2), 1, 20, {"local_window_size": 4}),
    "one token, bias": Turn((11, 6), 1, 20, bias=(1, H)),
    "one token, rotary": Turn((11, 6), 1, 20, {"do_rotary": 1}),
    "one token, interleaved": Turn((11, 6), 1, 20, {"do_rotary": 1, "rotary_interleaved": 1}),
    "one token, position ids": Turn((11, 6), 1, 20, {"do_rotary": 1}, position_ids=True),
    "prompt, position ids": Turn((6, 6), 6, 8, {"do_rotary": 1}, position_ids=True),
    "prompt, counted positions": Turn(
        (6, 4), 6, 8, {"do_rotary": 1, "counted_prompt": 1}, position_ids=True, norm=True
    ),
    "prompt in parts, counted positions": Turn(
        (11,), 5, 20, {"do_rotary": 1, "counted_prompt": 1}, position_ids=True, dtype=BFLOAT16
    ),
    "one token, counted positions": Turn((11, 6), 1, 20, {"do_rotary": 1, "counted_prompt": 1}, position_ids=True),
    "first token, counted positions": Turn((1, 1), 1, 20, {"do_rotary": 1, "counted_prompt": 1}, position_ids=True),
    "blocks, counted positions": Turn(
        (9,),
        9,
        attributes={"do_rotary": 1, "counted_prompt": 1},
        position_ids=True,
        blocks=((0, 1, 1, 1, 0, 2, 2, 3, 3),),
    ),
    "scale and softcap": Turn((9,), 4, 12, {"scale": 0.7, "softcap": 2.0}),
    "softcap and bias": Turn((11,), 1, 12, {"softcap": 2.0}, bias=(1, 1)),
    "norm": Turn((9,), 4, 12, {"do_rotary": 1, "qk_norm_epsilon": 0.01}, norm=True),
    "norm, separate": Turn((9,), 4, 12, {"do_rotary": 1}, norm=True, packed=False),
    "separate": Turn((7, 4), 7, 12, packed=False),
    "no cache": Turn((7, 3), 7, past=False),
    "no cache, no lengths": Turn((7, 7), 7, past=False, lengths=False),
    "non-causal": Turn((7, 7), 7, attributes={"causal": 0}, packed=False, past=False, lengths=False),
    "non-causal, ragged": Turn((7, 3), 7, attributes={"causal": 0}, packed=False, past=False),
    "bfloat16": Turn((11,), 5, 16, dtype=BFLOAT16),
    "bfloat16, ragged": Turn((7, 3), 7, 16, dtype=BFLOAT16),
    "bfloat16, one token": Turn((11, 5), 1, 16, {"do_rotary": 1}, norm=True, dtype=BFLOAT16),
    "float16": Turn((11,), 5, 6, dtype=np.float16),
    "float16, one token": Turn((11, 5), 1, 16, {"do_rotary": 1}, dtype=np.float16),
    "sink": Turn((9,), 4, 12, {"do_rotary": 1}, sink=True),
    "sink, ragged": Turn((7, 3), 7, sink=True, norm=True),
    "sink, one token": Turn((11, 6), 1, 20, sink=True),
    "sink, window and bias": Turn((11,), 5, 20, {"local_window_size": 4}, bias=(1, H), sink=True),
    "sink, softcap": Turn((11,), 5, 20, {"softcap": 2.0}, sink=True),
    "sink, non-causal": Turn((7,), 7, attributes={"causal": 0}, past=False, sink=True),
    "sink, window-sized cache": Turn((24,), 9, 6, WINDOW, sink=True),
    "sink and blocks": Turn((16,), 7, 20, blocks=((0, 2, 2, 2, 2, 2, 0),), sink=True),
    "blocks": Turn((9,), 9, 12, blocks=((0, 1, 1, 1, 0, 2, 2, 3, 3),)),
    "blocks, ragged": Turn(
        (9, 5), 9, 12, {"do_rotary": 1}, blocks=((1, 1, 1, 1, 1, 4, 4, 4, 4), (0, 0, 7, 7, 7, 7, 7, 7, 0))
    ),
    "blocks, growing": Turn((16,), 7, 9, norm=True, blocks=((-1, -1, 5, 5, 5, 5, 0),)),
    "blocks, past, shared buffer": Turn((16,), 7, 30, dtype=BFLOAT16, blocks=((3, 3, 3, 3, 0, 5, 5),)),
    "blocks, window": Turn((16,), 7, 20, {"local_window_size": 3}, blocks=((0, 2, 2, 2, 2, 2, 0),)),
    "blocks, softcap and bias": Turn(
        (16,), 7, 20, {"softcap": 2.0, "scale": 0.7}, bias=(1, H), blocks=((0, 2, 2, 2, 2, 2, 0),)
    ),
    "blocks, bias of a first prompt": Turn(
        (7, 6), 7, bias=(2, 1), blocks=((0, 2, 2, 2, 2, 2, 0), (1, 1, 1, 1, 1, 1, 1))
    ),
    "blocks, no cache": Turn(
        (7, 7), 7, past=False, lengths=False, packed=False, blocks=((1,) * 7, (0, 1, 1, 1, 1, 2, 2))
    ),
    "blocks, non-causal": Turn((7,), 7, attributes={"causal": 0}, past=False, blocks=((1, 1, 1, 0, 0, 2, 2),)),
    "blocks, one token": Turn((11, 6), 1, 20, blocks=((1,), (0,))),
    "window-sized cache, blocks": Turn((24,), 9, 6, WINDOW, blocks=((1, 1, 1, 1, 1, 0, 2, 2, 2),)),
    "window-sized cache, blocks of a first prompt": Turn(
        (9, 9), 9, 6, WINDOW, blocks=((1, 1, 1, 1, 1, 0, 2, 2, 2), (1,) * 9)
    ),
    "window-sized cache, ragged": Turn((9, 21, 4), 1, 6, WINDOW),
    "window-sized cache, bfloat16": Turn(
        (9,), 3, 6, {"local_window_size": 4, "sliding_window_cache": 1}, dtype=BFLOAT16
    ),
    **{
        f"window-sized cache of {capacity}, {past} + {new}": Turn((past + new,), new, capacity, WINDOW)
        for capacity in (4, 6, 9)
        for past, new in ((0, 3), (0, 13), (5, 1), (9, 1), (20, 1), (9, 7), (4, 15))
    },
}
