# SPDX-License-Identifier: Apache-2.0
"""Helpers of the designs: sub-tiles, sweeps over keys, and runs of a transfer."""

import numpy as np
import pytest

from flownpu.aie.designs.attention import ALL_KEYS, sweep
from flownpu.aie.designs.common import bits, equal_steps, pieces, tiled, untiled
from tests.aie.small_programs import indices


def test_sub_tiles_invert_to_same_matrix():
    matrix = np.arange(16 * 24)
    sent = matrix[indices(tiled(16, 24).walk)]
    np.testing.assert_array_equal(sent.reshape(2, 3, 8, 8)[1, 2], matrix.reshape(16, 24)[8:, 16:])
    np.testing.assert_array_equal(sent[indices(untiled(16, 24).walk)], matrix)


def test_sweep_words_equal_hand_count():
    assert sweep(100, 8, 108, 16, window=None, causal=True, scale=1).chunks == 7
    part = sweep(100, 8, 108, 16, window=20, causal=True, scale=1)
    assert (part.first_key, part.chunks) == (80, 2)  # the first query sees from 81
    # The first query, 100, sees keys from 95 on, the last of a chunk.
    assert sweep(100, 8, 108, 16, window=6, causal=True, scale=1).first_key == 80
    everything = sweep(0, 8, 108, 16, window=None, causal=False, scale=0.5)
    assert (everything.first_key, everything.chunks) == (0, 7)
    assert everything.words(0, 8) == [7, 0, 0, 108, ALL_KEYS, 0, bits(0.5 * np.log2(np.e)), 8]
    assert np.int32(bits(-1.5)).view(np.float32) == np.float32(-1.5)


def test_runs_are_cut_within_wrap_limit():
    assert pieces(8192, 2) == (8, 1024)  # 512 words: the wrap holds 1023
    assert pieces(9216, 1) == (3, 3072)
    assert pieces(2046, 2) == (1, 2046)
    assert pieces(2048, 2, most=256) == (4, 512)
    with pytest.raises(ValueError, match="expected a run of whole words, got 3 elements of 2 bytes"):
        pieces(3, 2)
    assert equal_steps([0, 4, 8, 11], 4, 64) == [(0, 3), (11, 1)]
    assert equal_steps([0, 4, 8, 12], 4, 2) == [(0, 2), (8, 2)]
