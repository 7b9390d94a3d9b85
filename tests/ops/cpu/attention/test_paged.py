# SPDX-License-Identifier: Apache-2.0
"""PagedAttention: the CPU's step for every instruction set of this machine, and its function in stock ONNX Runtime,
against float64; and that a token's output depends on its own sequence alone."""

import dataclasses
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from flownpu.ops.contracts import input_names
from flownpu.ops.definitions import paged_attention
from tests.ops.cpu.attention.conversation import (
    CACHE_EPSILON,
    CACHE_TYPES,
    EPSILON,
    PAIRS_EPSILON,
    PAIRS_EXP,
    multiplies_pairs,
    rope_tables,
    rounds_by_rows,
)
from tests.ops.device import ISAS, Node
from tests.ops.stock_onnxruntime import model_of, node, value, with_functions
from tests.ops.stock_onnxruntime import run as run_stock
from tests.pairwise import pairwise

H, G, D = 4, 2, 64
ROWS = 8  # of a block

# PagedAttention takes no int8 cache.
POOL_TYPES = tuple(name for name in CACHE_TYPES if name != "int8")


@dataclasses.dataclass
class Sequence:
    """Random heads of `total` tokens."""

    total: int
    seed: int

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        self.query = rng.standard_normal((self.total, (H + 2 * G) * D), dtype=np.float32)


@dataclasses.dataclass
class Pool:
    """Sequences over one pool of blocks, each of which takes the next free blocks when it grows.

    Attributes:
        cache: its element type.
        isa: instruction set of the kernels.
        norm: QK-norm is done.
        attributes: of the node, besides the head counts and do_rotary.
        scattered: blocks of a sequence do not follow one another.
        threads: of the step.
        blocks: how many the pool has.
    """

    cache: str = "bfloat16"
    isa: str = ISAS[0]
    norm: bool = False
    attributes: dict[str, Any] = dataclasses.field(default_factory=dict)
    scattered: bool = True
    threads: int = 2
    blocks: int = 96

    def __post_init__(self) -> None:
        rng = np.random.default_rng(7)
        order = rng.permutation(self.blocks) if self.scattered else np.arange(self.blocks)
        self.free = list(order.astype(np.int32))
        shape = (self.blocks, ROWS, G, D)
        # Rows that nobody wrote may hold anything, and must not be read.
        self.caches = [np.full(shape, np.nan, CACHE_TYPES[self.cache]) for _ in range(2)]
        self.tables: dict[int, list[np.int32]] = {}
        self.past: dict[int, int] = {}
        weights = rng.uniform(0.5, 1.5, (2, D)).astype(np.float32)
        self.norms = tuple(weights) if self.norm else (None, None)
        self.constants = {"num_heads": H, "kv_num_heads": G, "head_size": D, "do_rotary": 1, **self.attributes}

    def inputs(self, work: list[tuple[Sequence, int]]) -> list[np.ndarray | None]:
        """The node's inputs for the next tokens of (sequence, tokens); takes the blocks that they need."""
        queries, tables, pasts = [], [], []
        for sequence, tokens in work:
            past = self.past.get(sequence.seed, 0)
            table = self.tables.setdefault(sequence.seed, [])
            while len(table) * ROWS < past + tokens:
                table.append(self.free.pop())
            queries.append(sequence.query[past : past + tokens])
            tables.append(table)
            pasts.append(past)
        columns = max(map(len, tables))
        padded = np.array([t + [np.int32(-1)] * (columns - len(t)) for t in tables], np.int32)
        boundaries = np.cumsum([0, *(len(query) for query in queries)]).astype(np.int32)
        return [
            np.concatenate(queries),
            *self.caches,
            boundaries,
            np.array(pasts, np.int32),
            padded,
            *rope_tables(1024),
            *self.norms,
        ]

    def node(self, inputs: list[np.ndarray | None]) -> Node:
        options = {"cpu_isa": self.isa, "threads": str(self.threads)}
        outputs = ("float", self.cache, self.cache)
        return Node("PagedAttention", inputs, outputs, options=options, **self.constants)

    def run(self, work: list[tuple[Sequence, int]]) -> list[np.ndarray]:
        """Computes the next tokens, which are in the cache then; the outputs of each sequence."""
        inputs = self.inputs(work)
        output, *_ = self.node(inputs)(*inputs, into={1: self.caches[0], 2: self.caches[1]})
        assert output is not None
        for sequence, tokens in work:
            self.past[sequence.seed] = self.past.get(sequence.seed, 0) + tokens
        assert inputs[3] is not None
        return np.split(output, inputs[3][1:-1])


def attend(pool: Pool, inputs: list[np.ndarray | None]) -> tuple[np.ndarray, np.ndarray]:
    """The node's output in float64 over the keys and values that the caches hold after it, by plain softmax.

    Returns:
        output [N, H d], and a bound on the error of each of its elements. A score is off by a share of |q| |k| scale:
        by the queries' rounding where pairs of bf16 are multiplied, and by sums of D products after some 32 roundings
        in norm and RoPE. Its weight is then off by twice that, by the rounding and the exponential of the weight
        itself, and every error moves the output by that share of sum p |v - o|. Sums over the keys round once for each.
    """
    query, _, _, boundaries, pasts, tables, cos, sin, q_norm, _ = inputs
    scale = pool.attributes.get("scale", D**-0.5)
    softcap, window = pool.attributes.get("softcap", 0), pool.attributes.get("local_window_size", -1)
    pairs = multiplies_pairs(pool.cache, pool.isa)
    outputs, bounds = [], []
    for b, past in enumerate(pasts):
        positions = past + np.arange(boundaries[b + 1] - boundaries[b])
        total = int(past) + len(positions)
        q = query[boundaries[b] : boundaries[b + 1], : H * D].astype(np.float64).reshape(-1, H, D)
        if q_norm is not None:
            q = q / np.sqrt((q * q).mean(-1, keepdims=True) + 1e-6) * q_norm
        if pool.constants["do_rotary"]:
            c, s = (table[positions][:, None].astype(np.float64) for table in (cos, sin))
            low, high = q[..., : D // 2], q[..., D // 2 :]
            q = np.concatenate([low * c - high * s, high * c + low * s], -1)
        used = tables[b, : -(-total // ROWS)]
        k, v = (cache[used].reshape(-1, G, D)[:total].astype(np.float64) for cache in pool.caches)
        for h in range(H):
            keys, values = k[:, h * G // H], v[:, h * G // H]
            scores = scale * q[:, h] @ keys.T
            if softcap:
                scores = softcap * np.tanh(scores / softcap)
            place = positions[:, None] - np.arange(total)
            scores[(place < 0) | ((window > 0) & (place >= window))] = -np.inf
            p = np.exp(scores - scores.max(-1, keepdims=True))
            p /= p.sum(-1, keepdims=True)
            output = p @ values
            spread = np.stack([row @ np.abs(values - o) for row, o in zip(p, output, strict=True)])
            norm = np.linalg.norm(q[:, h], axis=-1).max() * np.linalg.norm(keys, axis=-1).max()
            score = scale * norm * ((D + 32) * EPSILON + pairs * PAIRS_EPSILON)
            weight = 2 * score + pairs * 2 * (PAIRS_EPSILON + PAIRS_EXP)
            outputs.append(output)
            bounds.append(weight * spread + (total + 32) * EPSILON * np.abs(values).max())
    shape = (len(query), H * D)
    by_token = [
        np.concatenate([np.stack(rows[i : i + H], 1).reshape(-1, H * D) for i in range(0, len(rows), H)]).reshape(shape)
        for rows in (outputs, bounds)
    ]
    return by_token[0], by_token[1]


def check_caches(pool: Pool, expected: list[np.ndarray]) -> None:
    """Norm and RoPE round some 16 times; then at most one ulp of the cache's type. Rows that nobody wrote are NaN."""
    for mine, theirs in zip(pool.caches, expected, strict=True):
        np.testing.assert_allclose(
            mine.astype(np.float64), theirs.astype(np.float64), rtol=2 * CACHE_EPSILON[pool.cache], atol=16 * EPSILON
        )


@pytest.mark.parametrize(
    ("isa", "cache", "attributes"),
    pairwise(ISAS, [*POOL_TYPES], [{}, {"local_window_size": 20}, {"softcap": 5.0}, {"scale": 0.05}]),
)
def test_mixed_calls_equal_float64(isa: str, cache: str, attributes: dict[str, Any]) -> None:
    """A prompt, a part of one and a single token in one call, after calls that left a past."""
    pool = Pool(cache, isa, norm=True, attributes=attributes)
    a, b, c = Sequence(150, 1), Sequence(140, 2), Sequence(40, 3)
    for work in ([(a, 33)], [(a, 1), (b, 100)], [(a, 1), (b, 1), (c, 40)], [(a, 90), (b, 9)]):
        inputs = pool.inputs(work)
        _, *caches = paged_attention.reference(*inputs, **pool.constants)
        found = np.concatenate(pool.run(work))
        expected, bound = attend(pool, inputs)
        assert (np.abs(found - expected) <= bound).all(), (np.abs(found - expected) / bound).max()
        check_caches(pool, caches)


@pytest.mark.parametrize("window", [-1, 20, 300])
@pytest.mark.parametrize("cache", POOL_TYPES)
@pytest.mark.parametrize("isa", ISAS)
def test_prompt_alone_or_beside_others_has_same_bits(isa: str, cache: str, window: int) -> None:
    """A prompt has the same bits in one call or in pieces, alone or beside others, in whichever blocks."""
    attributes = {"local_window_size": window}
    sequences = [Sequence(301, 1), Sequence(97, 2), Sequence(280, 3)]
    alone, tolerance = {}, {}
    for sequence in sequences:
        pool = Pool(cache, isa, attributes=attributes, scattered=False, threads=1)
        inputs = pool.inputs([(sequence, sequence.total)])
        alone[sequence.seed] = pool.run([(sequence, sequence.total)])[0]
        # Both are off by the bound at most.
        tolerance[sequence.seed] = 2 * attend(pool, inputs)[1] if rounds_by_rows(cache, isa) else 0
    rng = np.random.default_rng(5)
    shared = Pool(cache, isa, attributes=attributes)
    found: dict[int, list[np.ndarray]] = {sequence.seed: [] for sequence in sequences}
    while True:
        left = [(s, s.total - shared.past.get(s.seed, 0)) for s in sequences]
        left = [(s, n) for s, n in left if n > 0]
        if not left:
            break
        work = [(s, int(min(n, rng.choice([1, 1, 3, 40, 111])))) for s, n in left]
        for (sequence, _), output in zip(work, shared.run(work), strict=True):
            found[sequence.seed].append(output)
    for seed, outputs in found.items():
        assert (np.abs(np.concatenate(outputs) - alone[seed]) <= tolerance[seed]).all()


def test_shared_prefix_blocks_give_same_bits() -> None:
    """Two sequences that share their first blocks."""
    pool = Pool()
    first = Sequence(60, 1)
    second = dataclasses.replace(first, total=60)
    second.query = np.concatenate([first.query[:32], Sequence(28, 2).query])
    second.seed = 2
    alone = Pool(scattered=False).run([(second, 60)])[0]
    pool.run([(first, 60)])
    pool.tables[2], pool.past[2] = pool.tables[1][: 32 // ROWS], 32
    np.testing.assert_array_equal(pool.run([(second, 28)])[0], alone[32:])


def test_nan_stays_in_its_sequence() -> None:
    """In the sequence with the NaN, earlier tokens do not change either."""
    clean, broken = Sequence(40, 1), Sequence(40, 2)
    cache = "float" if rounds_by_rows("bfloat16", ISAS[0]) else "bfloat16"  # a row beside a NaN is computed by itself
    alone = Pool(cache).run([(clean, 40)])[0]
    before = Pool(cache).run([(broken, 40)])[0]
    broken.query[25, -1] = np.inf
    output, other = Pool(cache).run([(clean, 40), (broken, 40)])
    np.testing.assert_array_equal(output, alone)
    np.testing.assert_array_equal(other[:25], before[:25])
    assert not np.isfinite(other[25:]).all(axis=1).any()


@pytest.mark.parametrize("attributes", [{}, {"local_window_size": 7, "softcap": 5.0}, {"do_rotary": 0}])
@pytest.mark.parametrize("cache", ["float", "bfloat16"])
@pytest.mark.parametrize("norm", [False, True])
def test_stock_onnxruntime_runs_function_with_same_numbers(norm: bool, cache: str, attributes: dict[str, Any]) -> None:
    pool = Pool(cache, norm=norm, attributes=attributes, blocks=20)
    a, b = Sequence(40, 1), Sequence(40, 2)
    pool.run([(a, 17), (b, 9)])
    inputs = pool.inputs([(a, 1), (b, 13)])
    feeds = {n: i for n, i in zip(input_names("PagedAttention"), inputs, strict=True) if i is not None}
    known = {name: value(name, array) for name, array in feeds.items()}
    given = [known.get(name) for name in input_names("PagedAttention")]
    model = with_functions(model_of([node("PagedAttention", given, 3, **pool.constants)], list(known.values())))
    for output, kind in zip(model.graph.outputs, ("float", cache, cache), strict=True):
        output.dtype = ir.DataType.from_numpy(np.dtype(CACHE_TYPES[kind]))
    found, *caches = run_stock(model, feeds)
    _, *expected_caches = paged_attention.reference(*inputs, **pool.constants)
    pool.caches = caches
    pool.isa = "generic"  # float32 throughout
    expected, bound = attend(pool, inputs)
    assert (np.abs(found - expected) <= bound).all(), (np.abs(found - expected) / bound).max()
    check_caches(pool, expected_caches)


REFUSED = {
    "block id above the pool": (5, lambda t: np.where(t >= 0, t + 1000, t), "expected blocks below 96"),
    "block id below 0": (5, lambda t: t * 0 - 1, "expected blocks below 96"),
    "too few blocks": (5, lambda t: t[:, :1], "expected a block_table of at least"),
    "lengths beyond the query": (3, lambda c: c + np.int32([0, 0, 4]), "grow from 0 to the 14 tokens"),
    "lengths that shrink": (3, lambda c: c * 0 + np.int32([0, 20, 14]), "grow from 0 to the 14 tokens"),
    "lengths from above 0": (3, lambda c: c + np.int32([1, 0, 0]), "grow from 0 to the 14 tokens"),
    "lengths of another batch": (3, lambda c: c[:-1], "one more than past_sequence_lengths"),
    "a past below 0": (4, lambda p: p - 1000, "expected past_sequence_lengths from 0 on"),
    "a past past 32 bits": (4, lambda p: p * 0 + np.int32(2**31 - 1), "no more than 2147483647"),
    "a table of another batch": (5, lambda t: t[:1], r"expected input 5 \(block_table\)"),
    "positions past the RoPE tables": (6, lambda c: c[:17], "cos_cache and sin_cache|expected input 7|positions below"),
    "heads of another size": (0, lambda q: q[:, :-1].copy(), "expected a query of shape"),
    "a cache of other heads": (1, lambda k: k[:, :, :1].copy(), r"expected input 2 \(value_cache\)"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_paged_attention_with_unfit_inputs_is_refused(case: str) -> None:
    index, change, message = REFUSED[case]
    pool = Pool()
    pool.run([(Sequence(40, 1), 17), (Sequence(40, 2), 9)])
    inputs = pool.inputs([(Sequence(40, 1), 1), (Sequence(40, 2), 13)])
    prepared = pool.node(inputs)
    wrong = list(inputs)
    wrong[index] = np.ascontiguousarray(change(inputs[index]))
    with pytest.raises(Exception, match=message):
        prepared(*wrong, into={1: pool.caches[0], 2: pool.caches[1]})
