# SPDX-License-Identifier: Apache-2.0
"""Kernels that only a decoder has, against float64: heads that are rotated and appended, attention of one sequence
among others, and the norms at an entry of the residual stream."""

import re

import ml_dtypes
import numpy as np
import pytest

from flownpu.ops import q4nx
from flownpu.ops.definitions.int8_cache import dequantise_rows, quantise_rows
from flownpu.selftest.gpu.attention import off_by_halves
from flownpu.selftest.gpu.case import LEAST_HALF
from tests.ops.device import testing

pytestmark = [pytest.mark.opencl, pytest.mark.usefixtures("pocl")]

gpu = testing.gpu
F32 = 2.0**-24
BFLOAT16 = ml_dtypes.bfloat16
EPSILON = 1e-6


@pytest.fixture(scope="module")
def context(pocl):
    del pocl
    return gpu.open()


@pytest.fixture(scope="module")
def context_in_turn(gpu_api):
    return gpu.open(vulkan=gpu_api == "vulkan")


@pytest.mark.parametrize(("qk_norm", "half_cache", "part"), [(True, True, 0), (False, False, 0), (True, False, 10)])
def test_heads_are_normalised_rotated_and_appended(context, rng, qk_norm, half_cache, part):
    """Rows from 2 on go to positions from 5 on, and are turned as rows of the table from 9 on are; all other rows and
    positions stay as they are."""
    heads, kv_heads, size, tokens, first, past, turn, capacity, positions = 4, 2, 26, 3, 2, 5, 9, 11, 16
    all_heads, half, scale = heads + 2 * kv_heads, (part or size) // 2, 0.3
    packed = rng.standard_normal((first + tokens, all_heads * size), dtype=np.float32)
    angles = rng.uniform(-np.pi, np.pi, (positions, half))
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    weights = [rng.uniform(0.5, 1.5, size).astype(np.float32) for _ in range(2)] if qk_norm else []
    query = np.full((first + tokens, heads * size), 7, np.float32)
    store = np.float16 if half_cache else np.float32
    key, value = (np.full((kv_heads, capacity, size), 7, store) for _ in range(2))
    cache = "float16" if half_cache else "float"
    kernel = gpu.append_heads(gpu.Heads(heads, kv_heads, size, cache, scale, qk_norm, EPSILON, part))
    context.run(
        kernel, [all_heads, tokens, 1], [packed, cos, sin, query, key, value, *weights], [first, past, turn, capacity]
    )

    given = packed[first:].astype(np.float64).reshape(tokens, all_heads, size)
    turned, kept = given[:, : heads + kv_heads], given[:, heads + kv_heads :]
    if qk_norm:
        turned = turned / np.sqrt(np.mean(turned**2, axis=-1, keepdims=True) + EPSILON)
        turned[:, :heads] *= weights[0]
        turned[:, heads:] *= weights[1]
    c, s = (table[turn : turn + tokens, None].astype(np.float64) for table in (cos, sin))
    low, high, rest = np.split(turned, [half, 2 * half], axis=-1)
    rotated = np.concatenate([low * c - high * s, high * c + low * s, rest], axis=-1)
    magnitude = np.concatenate(
        [np.abs(low * c) + np.abs(high * s), np.abs(high * c) + np.abs(low * s), np.abs(rest)], axis=-1
    )
    # The norm has the errors of 12 units and of 8 additions, halved by the root (selftest/gpu/rows.py); then come two
    # products and a sum.
    bound = (16 + 3) * F32 * magnitude
    queries = query[first:].reshape(tokens, heads, size)
    assert (
        np.abs(queries - scale * rotated[:, :heads]) <= scale * (bound[:, :heads] + F32 * magnitude[:, :heads])
    ).all()
    stored = 2.0**-11 if half_cache else 0.0
    for cache, expected, off in ((key, rotated[:, heads:], bound[:, heads:]), (value, kept, 0.0)):
        found = cache[:, past : past + tokens].astype(np.float64).transpose(1, 0, 2)
        assert (np.abs(found - expected) <= off + stored * np.abs(expected) + 2.0**-25).all()
        assert (np.delete(cache, np.arange(past, past + tokens), axis=1) == 7).all()
    assert (query[:first] == 7).all()


def check_attention(
    context, rng, *, heads, kv_heads, size, tokens, softcap=0.0, window=0, has_blocks=False, has_sinks=False,
    block=2, matrices=None, **shape,
):  # fmt: skip
    """The sequence's rows begin at 3; keys fill more than one chunk, and the cache has more room than keys."""
    first, past = 3, 130
    capacity = past + tokens + 7
    query = rng.standard_normal((first + tokens, heads * size), dtype=np.float32)
    key, value = (rng.standard_normal((1, kv_heads, capacity, size), dtype=np.float32) for _ in range(2))
    y = np.full_like(query, 7)
    kernel, grid = gpu.attention_of_sequence(
        heads, kv_heads, size, softcap, has_blocks, tokens=tokens, has_sinks=has_sinks,
        matrices=matrices or (0, 0, 0, 0), **shape,
    )  # fmt: skip
    # From beside all scores to above them, where the output is 0.
    sinks = np.linspace(-1, 40, heads, dtype=np.float32)
    ends = np.arange(1 - first, tokens + 1, dtype=np.int32)
    ends[first : first + block] = block  # they see one another
    arrays = [query, key, value, *([ends] if has_blocks else []), y, *([sinks] if has_sinks else [])]
    context.run(kernel, grid, arrays, [first, past, tokens, capacity, window])
    for token in range(tokens):
        position = past + token
        seen = past + int(ends[first + token]) if has_blocks else position + 1
        keys = slice(max(0, position + 1 - window) if window else 0, seen)
        for head in range(heads):
            at = slice(head * size, (head + 1) * size)
            k, v = (cache[0, head // (heads // kv_heads), keys].astype(np.float64) for cache in (key, value))
            terms = k * query[first + token, at]
            scores = terms.sum(axis=1)
            if softcap:
                scores = softcap * np.tanh(scores / softcap)
            largest = max(scores.max(), sinks[head] if has_sinks else -np.inf)
            weights = np.exp(scores - largest)
            weights /= weights.sum() + (np.exp(sinks[head] - largest) if has_sinks else 0)
            # A score is a sum of `size` terms; e to the power of its error changes the weights, twice (in the numerator
            # and the denominator), as do the sums over all keys, by a rounding for each addition. With matrices all
            # factors become float16, the weights times 2^15.
            of_score, of_values = (size + 4) * F32 * np.abs(terms).sum(axis=1), 0.0
            if matrices is not None:
                of_score += off_by_halves("kd,d->k", np.abs(k), np.abs(query[first + token, at]))
                of_values = off_by_halves("k,kd->d", weights, np.abs(v), LEAST_HALF / 2**15)
            bound = (np.expm1(2 * of_score.max()) + 2 * (capacity + 2) * F32) * (weights @ np.abs(v)) + of_values
            assert (np.abs(y[first + token, at] - weights @ v) <= bound).all()
    assert (y[:first] == 7).all()


@pytest.mark.parametrize(("has_blocks", "has_sinks"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize(("softcap", "window"), [(0.0, 0), (2.0, 70)])
def test_sequence_among_others_equals_float64(context, rng, softcap, window, has_blocks, has_sinks):
    check_attention(
        context, rng, heads=4, kv_heads=2, size=26, tokens=2, softcap=softcap, window=window, has_blocks=has_blocks,
        has_sinks=has_sinks,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size"),
    [
        (4, 2, 28),  # 4 tokens of 2 heads
        (2, 2, 26),  # 8 of one
        (3, 1, 20),  # 2 of 3: 6 rows
        (20, 2, 8),  # two work-groups of 5 heads, a token each
        (1, 1, 2052),  # more units than lanes
    ],
)
@pytest.mark.parametrize(("window", "has_blocks", "lanes"), [(0, False, 64), (5, True, 256)])
def test_tile_tokens_equal_float64(context, rng, heads, kv_heads, size, window, has_blocks, lanes):
    """The last tile is not full; windows are shorter than what the tile's tokens see together. With sinks in one."""
    check_attention(
        context, rng, heads=heads, kv_heads=kv_heads, size=size, tokens=11, window=window, has_blocks=has_blocks,
        in_tiles=True, lanes=lanes, has_sinks=not has_blocks,
    )  # fmt: skip


def test_block_of_whole_chunk_equals_float64(context, rng):
    """An image's 256 tokens, each of which sees all."""
    check_attention(
        context, rng, heads=2, kv_heads=1, size=8, tokens=256, has_blocks=True, block=256, in_tiles=True, lanes=64
    )


@pytest.mark.parametrize(("heads", "size"), [(8, 256), (4, 256), (1, 64), (8, 128), (16, 128), (71, 64), (8, 512)])
def test_attention_memory_fits_32_kib(heads, size):
    """OpenCL 1.2 requires 32 KiB of every device."""
    assert heads_bytes(heads, size) <= gpu.attention_memory(heads, 1, size) <= 32 * 1024


def heads_bytes(heads, size):
    """The bytes of the work-group's memory that the kernel's text declares."""
    text = gpu.generate(gpu.attention_of_sequence(heads, 1, size, 0.0, False)[0])
    declared = re.findall(r"shared (float4?) \w+\[([0-9 */]+)\];", text)
    assert len(declared) == text.count("shared float") - text.count("(shared float")
    return sum((16 if kind == "float4" else 4) * eval(count.replace("/", "//")) for kind, count in declared)  # noqa: S307


@pytest.mark.parametrize("parts", [1, 2, 5, 64])
@pytest.mark.parametrize(("softcap", "window"), [(0.0, 0), (2.0, 70)])
def test_keys_shared_among_work_groups_equal_float64(context, rng, softcap, window, parts):
    """One token behind 199 others, in row 3; with more parts than chunks of keys, some parts have none."""
    heads, kv_heads, size, first, past, capacity = 4, 2, 26, 3, 199, 210
    query = rng.standard_normal((first + 1, heads * size), dtype=np.float32)
    key, value = (rng.standard_normal((1, kv_heads, capacity, size), dtype=np.float32) for _ in range(2))
    sums, states = np.full((parts, heads * size), np.nan, np.float32), np.full((parts, heads, 2), np.nan, np.float32)
    y = np.full_like(query, 7)
    share, merge = gpu.attention_in_parts(heads, kv_heads, size, softcap)
    lengths = [first, past, 1, capacity, window]
    context.run(share, [kv_heads, 1, parts], [query, key, value, sums, states], [*lengths, parts])
    context.run(merge, [heads, 1, 1], [sums, states, y], [first, parts])
    whole = np.full_like(query, 7)
    kernel, grid = gpu.attention_of_sequence(heads, kv_heads, size, softcap, False)
    context.run(kernel, grid, [query, key, value, whole], lengths)
    # Both sum 200 terms with weights below 1, in different orders, each within as many roundings (above); a weight is
    # off by exp's 3 units and the score's error, which is the same in both.
    np.testing.assert_allclose(y, whole, rtol=0, atol=(2 * 200 + 20) * F32 * np.abs(value).max())
    assert (y[:first] == 7).all()


_CACHES = {"float": np.float32, "float16": np.float16, "bfloat16": np.uint16, "int8": np.int8}


def _stored(rows, cache):
    """Rows as a cache of that type has them."""
    if cache == "int8":
        return quantise_rows(rows)
    return rows.astype(BFLOAT16).view(np.uint16) if cache == "bfloat16" else rows.astype(_CACHES[cache])


@pytest.mark.parametrize(
    ("cache", "heads", "kv_heads", "size", "qk_norm", "parts", "past", "window", "lanes", "rotated"),
    [
        ("float", 4, 2, 26, True, 1, 130, 70, 256, 0),  # with sinks, where there is a float cache
        ("float", 4, 2, 28, False, 3, 150, 0, 64, 12),
        ("float16", 4, 2, 28, False, 3, 150, 0, 64, 12),
        ("bfloat16", 3, 1, 64, True, 2, 40, 0, 64, 16),
        ("int8", 20, 2, 16, True, 1, 129, 0, 64, 0),  # two work-groups of a KV head, of which one appends
        ("int8", 2, 2, 26, False, 2, 64, 0, 64, 0),
        ("float", 2, 1, 8, False, 1, 0, 5, 64, 0),  # no key but its own
    ],
)
def test_token_that_appends_equals_appending_before(
    context_in_turn, rng, cache, heads, kv_heads, size, qk_norm, parts, past, window, lanes, rotated
):
    """The rows in the cache and the output are those of the two kernels that a prompt takes."""
    context, (first, capacity, turn), has_sinks = context_in_turn, (2, past + 3, 1), cache == "float"
    all_heads, softcap = heads + 2 * kv_heads, 3.0 if qk_norm else 0.0
    shape = gpu.Heads(heads, kv_heads, size, cache, 0.3, qk_norm, EPSILON, rotated)
    packed = rng.standard_normal((first + 1, all_heads * size), dtype=np.float32)
    angles = rng.uniform(-np.pi, np.pi, (3, (rotated or size) // 2))
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    norms = [rng.uniform(0.5, 1.5, size).astype(np.float32) for _ in range(2)] if qk_norm else []
    sinks = [rng.standard_normal(heads, dtype=np.float32) * 3] if has_sinks else []
    old = [_stored(rng.standard_normal((kv_heads, capacity, size), dtype=np.float32), cache) for _ in range(2)]
    key, value = (part.copy() for part in old)
    query, y = (np.full((first + 1, heads * size), 7, np.float32) for _ in range(2))
    context.run(
        gpu.append_heads(shape), [all_heads, 1, 1], [packed, cos, sin, query, key, value, *norms],
        [first, past, turn, capacity],
    )  # fmt: skip
    plain, grid = gpu.attention_of_sequence(
        heads, kv_heads, size, softcap, False, lanes=lanes, cache=cache, has_sinks=has_sinks
    )
    context.run(plain, grid, [query, key, value, y, *sinks], [first, past, 1, capacity, window])

    found, lengths = np.full_like(y, 7), [first, past, 1, capacity, window]
    appended = [part.copy() for part in old]
    kernel, grid, merge = gpu.appending_attention(shape, softcap, parts, lanes, has_sinks)
    tables = [cos, sin, *appended, *norms]
    if parts == 1:
        context.run(kernel, grid, [packed, *old, found, *tables, *sinks], [*lengths, turn])
    else:
        sums, states = np.full((parts, heads * size), np.nan, np.float32), np.zeros((parts, heads, 2), np.float32)
        context.run(kernel, grid, [packed, *old, sums, states, *tables], [*lengths, parts, turn])
        context.run(merge, [heads, 1, 1], [sums, states, found, *sinks], [first, parts])
    values = _read(value, cache)
    # Both add products in the same precision and different orders: scores of `size` terms, weights' sums over all keys
    # (twice, numerator and denominator), and with QK-norm sums of squares.
    bound = (4 * (size + 24) * np.abs(query[first]).max() * np.abs(_read(key, cache)).max() + 2 * (past + 30)) * F32
    np.testing.assert_allclose(found, y, rtol=0, atol=bound * np.abs(values).max())
    for mine, its in zip(appended, (key, value), strict=True):
        row, expected = _read(mine[:, past], cache), _read(its[:, past], cache)
        # Without QK-norm the same operations; else a key may be rounded to the neighbour.
        step = {"float": 16 * F32, "float16": 2.0**-10, "bfloat16": 2.0**-7, "int8": 2.0**-6}[cache] * qk_norm
        np.testing.assert_allclose(row, expected, rtol=0, atol=step * np.abs(expected).max())


def _read(rows, cache):
    if cache == "int8":
        return dequantise_rows(rows)
    return rows.view(BFLOAT16).astype(np.float32) if cache == "bfloat16" else rows.astype(np.float32)


@pytest.mark.parametrize(
    ("columns", "has_skip", "norms_skip"), [(64, False, False), (77, True, False), (96, True, True)]
)
def test_product_normalises_its_input(context_in_turn, rng, columns, has_skip, norms_skip):
    """And adds the update, which is normalised before, and writes the sum once."""
    rows, tokens = 40, 2
    x, skip = (rng.standard_normal((tokens, columns), dtype=np.float32) for _ in range(2))
    weight, of_skip = (rng.uniform(0.5, 1.5, columns).astype(np.float32) for _ in range(2))
    given = rng.standard_normal((rows, columns), dtype=np.float32)
    blocks = q4nx.pack(*q4nx.quantize(given), q4nx.NARROW)
    matrix = q4nx.dequantize(blocks, rows, columns).astype(np.float64)
    y, total = np.zeros((tokens, rows), np.float32), np.zeros_like(x)
    kernel, grid = gpu.normalising_product(rows, columns, has_skip, norms_skip, EPSILON)
    others = [weight, *([skip] if has_skip else []), *([of_skip] if norms_skip else []), *([total] if has_skip else [])]
    context_in_turn.run(kernel, grid, [x, blocks, y, *others])

    def norm(values):
        return values / np.sqrt(np.mean(values**2, axis=-1, keepdims=True) + EPSILON)

    wide = skip.astype(np.float64)
    added = (norm(wide) * of_skip if norms_skip else wide) * has_skip
    expected = x + added
    if has_skip:
        # 16 units of a norm (selftest/gpu/rows.py), and the sum's.
        assert (np.abs(total - expected) <= 16 * F32 * np.abs(added) + F32 * np.abs(expected)).all()
    normalised = norm(expected) * weight
    # A row's elements are off by two norms and a sum; then come as many additions as a lane and the lanes make.
    assert (
        np.abs(y - normalised @ matrix.T) <= (2 * 17 + 3 + columns) * F32 * (np.abs(normalised) @ np.abs(matrix.T))
    ).all()


def test_skip_is_normalised_before_adding(context, rng):
    columns, rows = 77, 3
    x, skip = (rng.standard_normal((rows, columns), dtype=np.float32) for _ in range(2))
    weight, of_skip = (rng.uniform(0.5, 1.5, columns).astype(np.float32) for _ in range(2))
    y, total = np.zeros_like(x), np.zeros_like(x)
    context.run(gpu.entry_norm(columns, EPSILON), [rows, 1, 1], [x, weight, y, skip, of_skip, total], [rows])

    def norm(values):
        return values / np.sqrt(np.mean(values**2, axis=-1, keepdims=True) + EPSILON)

    added = norm(skip.astype(np.float64)) * of_skip
    expected = x + added
    # 16 units of a norm (above), and the sum's.
    bound = 16 * F32 * np.abs(added) + F32 * np.abs(expected)
    assert (np.abs(total - expected) <= bound).all()
    # The errors of a row's elements, relative to its rms, and the second norm's own.
    scaled = weight / np.sqrt(np.mean(expected**2, axis=-1, keepdims=True))
    assert (np.abs(y - norm(expected) * weight) <= 2 * bound.max() * scaled + 16 * F32 * np.abs(y)).all()


def test_values_share_buffers_when_they_do_not_live_together():
    """The largest value first, each in the smallest free buffer; one with two lifetimes keeps others out in both."""
    values = [(10, [(0, 1)]), (100, [(1, 2)]), (60, [(3, 4)]), (50, [(4, 5)]), (8, [(0, 0), (5, 5)])]
    of, sizes = gpu.share_buffers(values)
    assert sizes == [100, 50]
    # 60 goes where 100 was; 50 meets it; 10 meets 100 alone, 8 meets 10 and 50.
    assert of == [1, 0, 0, 1, 0]


def test_random_values_never_meet_in_buffer(rng):
    values = [
        (int(rng.integers(1, 1000)), [(int(a), int(a + rng.integers(0, 4))) for a in rng.integers(0, 20, 2)])
        for _ in range(60)
    ]
    of, sizes = gpu.share_buffers(values)
    users = {}
    for (size, lives), buffer in zip(values, of, strict=True):
        assert size <= sizes[buffer]
        for begin, end in lives:
            for step in range(begin, end + 1):
                users.setdefault((buffer, step), set()).add(id(lives))
    assert all(len(found) == 1 for found in users.values())
    assert sum(sizes) < sum(size for size, _ in values) / 2


def test_rates_of_delta_rule_equal_float64(context_in_turn, rng):
    """Rows from 2 on; the softplus of large and small numbers, too."""
    heads, columns, first, tokens = 3, 77, 2, 4
    x = rng.standard_normal((first + tokens, columns), dtype=np.float32)
    a, c = (rng.standard_normal((columns, heads), dtype=np.float32) for _ in range(2))
    bias, scale = np.array([0, 30, -30], np.float32), -rng.uniform(0.1, 2, heads).astype(np.float32)
    decay, share = (np.full((first + tokens, heads), 7, np.float32) for _ in range(2))
    context_in_turn.run(
        gpu.delta_rates(heads, columns), [heads, tokens, 1], [x, a, c, bias, scale, decay, share], [first]
    )
    wide = x[first:].astype(np.float64)
    # A sum of `columns` terms, and the bias. Slopes of softplus and sigmoid are 1 and 1/4 at most. Softplus adds the
    # logarithm of up to 2, with errors of exp, log and a sum; sigmoid has exp's, a sum's and a quotient's.
    off = (columns + 2) * F32 * (np.abs(wide) @ np.abs(a) + np.abs(bias))
    expected = scale * np.logaddexp(0, wide @ a + bias)
    assert (np.abs(decay[first:] - expected) <= np.abs(scale) * (off + 12 * F32) + 4 * F32 * np.abs(expected)).all()
    off = (columns + 2) * F32 * (np.abs(wide) @ np.abs(c))
    expected = 1 / (1 + np.exp(-(wide @ c)))
    assert (np.abs(share[first:] - expected) <= off / 4 + 12 * F32 * expected).all()
    assert (decay[:first] == 7).all()
    assert (share[:first] == 7).all()


def test_gate_of_attention_equals_float64(context_in_turn, rng):
    x, gate = (rng.standard_normal(131, dtype=np.float32) * 5 for _ in range(2))
    y = np.zeros_like(x)
    context_in_turn.run(gpu.sigmoid_gate(), [3, 1, 1], [x, gate, y], [131])
    expected = x / (1 + np.exp(-gate.astype(np.float64)))
    np.testing.assert_allclose(y, expected, rtol=12 * F32, atol=0)  # exp's error of 6, a sum and a quotient
