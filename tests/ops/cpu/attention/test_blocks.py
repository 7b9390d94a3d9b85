# SPDX-License-Identifier: Apache-2.0
"""Tokens that see one another (`bidirectional_blocks`), as pictures do, for every instruction set, against float64."""

import numpy as np
import pytest

from tests.ops.cpu.attention.conversation import ATTENTION_ISAS, CACHE_TYPES, SIZES, Conversation, D, G, H, blocks_of
from tests.ops.device import run
from tests.pairwise import pairwise


@pytest.mark.parametrize(
    ("isa", "cache", "attributes"),
    pairwise(ATTENTION_ISAS, [*CACHE_TYPES], [{}, {"local_window_size": 48}, {"local_window_size": 200}]),
)
def test_tokens_of_block_see_later_ones(isa: str, cache: str, attributes: dict[str, int]) -> None:
    """Pictures of 100 tokens, one after text and two side by side; before a past, on top of it, and with one token."""
    talk = Conversation(capacity=512, cache=cache, isa=isa, norm=True, **attributes)
    talk.turn(250, blocks=blocks_of([(0, 7), (1, 100), (0, 13), (2, 100), (3, 30)]))
    talk.turn(1, blocks=blocks_of([(1, 1)]))
    talk.turn(130, blocks=blocks_of([(5, 100), (-1, 29), (6, 1)]))
    # So few queries that a special kernel attends, and their keys are cut into parts.
    talk.turn(2, blocks=blocks_of([(1, 2)]))


@pytest.mark.parametrize("isa", ATTENTION_ISAS)
@pytest.mark.parametrize("heads", [(2, 1, 256), (3, 3, 72), (5, 1, 33)])
def test_blocks_of_odd_heads_equal_float64(isa: str, heads: tuple[int, int, int]) -> None:
    talk = Conversation(capacity=0, cache="bfloat16", isa=isa, heads=heads, rotary=False)
    talk.remember(600)
    talk.turn(3, blocks=blocks_of([(0, 1), (1, 2)]))
    talk.turn(67, blocks=blocks_of([(0, 1), (2, 65), (0, 1)]))


def test_unfit_blocks_are_refused() -> None:
    query = np.zeros((1, 4, (H + 2 * G) * D), np.float32)
    for blocks, message in (
        (blocks_of([(2, 1), (1, 3)]), "to grow from block to block, got 1 after 2 in row 0"),
        (blocks_of([(1, 1), (0, 2), (1, 1)]), "to grow from block to block, got 1 after 1 in row 0"),
    ):
        with pytest.raises(ValueError, match=message):
            run("FlowQKVAttention", [query, *[None] * 12, blocks], **SIZES)
