# SPDX-License-Identifier: Apache-2.0
"""The caches of FlowQKVAttention: ragged batches, caches of a window, rewinds, empty calls, positions of rows."""

import numpy as np
import pytest

from tests.ops.cpu.attention.conversation import SIZES, Conversation, D, G, H
from tests.ops.device import ISAS, run


@pytest.mark.parametrize("capacity", [0, 64])
@pytest.mark.parametrize("cache", ["float", "bfloat16", "int8"])
def test_ragged_batch_equals_float64(capacity: int, cache: str) -> None:
    talk = Conversation(capacity=capacity, cache=cache, batch=3, local_window_size=12)
    talk.turn(20, lengths=[20, 7, 1])
    for _ in range(3):
        talk.turn(1)


@pytest.mark.parametrize("capacity", [16, 17, 23, 48])
@pytest.mark.parametrize("turns", [(40, 1, 1, 30, 1), (3, 9, 8, 8, 1, 1, 1, 1), (16, 1, 1), (1,) * 60])
@pytest.mark.parametrize("cache", ["float", "int8"])
def test_window_sized_cache_evicts_in_steps(capacity: int, turns: tuple[int, ...], cache: str) -> None:
    """Evicts in steps of C - W + 1, for one token as for prompts longer than the cache."""
    talk = Conversation(capacity=capacity, cache=cache, local_window_size=16, sliding_window_cache=1)
    for tokens in turns:
        talk.turn(tokens)


def test_window_sized_cache_smaller_than_window_serves_short_sequence() -> None:
    """As GenAI allocates the cache for an answer shorter than the window."""
    talk = Conversation(capacity=12, local_window_size=16, sliding_window_cache=1)
    for tokens in (9, 1, 1, 1):
        talk.turn(tokens)


def test_window_sized_cache_of_ragged_batch_equals_float64() -> None:
    talk = Conversation(capacity=20, batch=3, local_window_size=16, sliding_window_cache=1)
    talk.turn(50, lengths=[50, 30, 2])
    for _ in range(12):
        talk.turn(1)


@pytest.mark.parametrize("cache", ["float", "int8"])
def test_rewound_cache_equals_float64(cache: str) -> None:
    """Fewer tokens so far than before: later positions in the shared cache no longer count."""
    talk = Conversation(capacity=64, cache=cache)
    talk.turn(30)
    talk.lengths = np.array([12])
    talk.turn(1)
    talk.lengths = np.array([5])
    talk.turn(9)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("heads", [(2, 2, 5), (4, 2, 64)])
@pytest.mark.parametrize(("batch", "tokens", "total"), [(0, 3, 3), (0, 1, 4), (2, 0, 4), (1, 0, 0), (0, 0, 0)])
def test_empty_batch_keeps_cache(isa: str, heads: tuple[int, int, int], batch: int, tokens: int, total: int) -> None:
    """The cache is kept, and the output is empty."""
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
def test_half_cache_is_written(kept: int) -> None:
    """If only keys, or only values, are read, they are written like both."""
    query = np.random.default_rng(8).standard_normal((2, 7, (H + 2 * G) * D), dtype=np.float32)
    names = tuple("float" if i in (0, kept) else "" for i in range(3))
    whole = run("FlowQKVAttention", [query], outputs=("float",) * 3, **SIZES)
    half = run("FlowQKVAttention", [query], outputs=names, **SIZES)
    np.testing.assert_array_equal(half[0], whole[0])
    np.testing.assert_array_equal(half[kept], whole[kept])
