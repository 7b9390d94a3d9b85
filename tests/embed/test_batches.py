# SPDX-License-Identifier: Apache-2.0
"""Batches have every text once, little padding, and at most MOST_TOKENS tokens."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from flownpu.embed.batches import MOST_PADDING, MOST_TOKENS, batches, padded


@given(st.lists(st.integers(1, 2 * MOST_TOKENS), max_size=200))
def test_batches_are_within_room_and_padding(lengths: list[int]) -> None:
    found = list(batches(lengths))
    assert sorted(np.concatenate([*found, np.array([], np.int64)]).tolist()) == list(range(len(lengths)))
    for batch in found:
        rows = [lengths[index] for index in batch]
        assert rows == sorted(rows, reverse=True)
        room = len(rows) * rows[0]
        assert len(rows) == 1 or room <= MOST_TOKENS
        assert room - sum(rows) <= MOST_PADDING * room


def test_padding_fills_rows() -> None:
    np.testing.assert_array_equal(padded([[3, 4], [5]], 9), [[3, 4], [5, 9]])
