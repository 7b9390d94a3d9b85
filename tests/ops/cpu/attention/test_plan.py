# SPDX-License-Identifier: Apache-2.0
"""The cut of attention into tasks (ops/cpu/attention/plan.h) covers all work, with enough tasks for every thread."""

from itertools import product

import pytest

from tests.ops.cpu.attention.conversation import ATTENTION_ISAS, CACHE_TYPES
from tests.ops.device import testing

MACHINE = {"threads": 2, "cache_bytes": 1 << 20, "few_rows": 8, "block_rows": 64, "element": 2}
SHAPE = {
    "batch": 1,
    "kv_heads": 1,
    "heads_per_group": 4,
    "head_size": 256,
    "tokens": 1,
    "total": 4096,
    "window": 0,
    "row_bytes": 512,
}


@pytest.mark.parametrize("group", [(1, 1, 64), (1, 4, 256), (8, 4, 64), (4, 2, 256), (1, 40, 16), (2, 1, 512)])
@pytest.mark.parametrize("tokens", [1, 2, 16, 300, 4096])
def test_plan_covers_all_work(group: tuple[int, int, int], tokens: int) -> None:
    kv_heads, per_group, head_size = group
    shape = {**SHAPE, "kv_heads": kv_heads, "heads_per_group": per_group, "head_size": head_size, "tokens": tokens}
    shape["row_bytes"] = 2 * head_size
    for threads, cache_bytes, window in product((1, 2, 16, 64), (256 << 10, 1 << 20, 2 << 20), (0, 512)):
        machine = {**MACHINE, "threads": threads, "cache_bytes": cache_bytes}
        plan = testing.attention_plan({**shape, "window": window}, machine)
        rows = plan["tile_tokens"] * per_group
        assert tokens <= plan["tiles"] * plan["tile_tokens"] < tokens + plan["tile_tokens"]
        assert plan["tasks"] == kv_heads * plan["tiles"] * plan["parts"]
        # A tile has all heads of a token. Beyond that, its queries (as they come, in f32, and as they are multiplied)
        # and numerators fill at most half of the L2, or it has 256 rows at most; and never more than 1024.
        row_bytes = head_size * (4 + MACHINE["element"] + 4)
        assert rows <= max(256, per_group) or rows * row_bytes <= cache_bytes / 2
        assert rows <= max(1024, per_group)
        assert bool(plan["few"]) == (rows <= MACHINE["few_rows"])
        assert plan["chunk_keys"] % 16 == 0
        # A chunk's re-ordered keys and values and a block of scores fill half of the L2, or the chunk is the smallest.
        key_bytes = 2 * head_size * MACHINE["element"] + 4 * MACHINE["block_rows"]
        assert plan["chunk_keys"] * key_bytes <= cache_bytes / 2 + 16 * key_bytes or plan["chunk_keys"] <= 64
        # Parts are worth handing out: 128 KB of K and V each.
        if plan["parts"] > 1:
            seen = min(4096, window + plan["tile_tokens"] - 1) if window else 4096
            assert seen / plan["parts"] * 2 * shape["row_bytes"] >= 128 << 10
            assert kv_heads * plan["tiles"] <= threads * (4 if plan["few"] else 2)


def test_plan_gives_each_thread_tasks() -> None:
    """One query on a long cache, a second turn, a whole prompt; short contexts stay in one piece."""
    long = testing.attention_plan({**SHAPE, "total": 32768}, MACHINE)
    assert (long["few"], long["parts"]) == (1, 16)
    assert testing.attention_plan({**SHAPE, "total": 32768}, {**MACHINE, "threads": 1})["parts"] == 1
    assert testing.attention_plan({**SHAPE, "total": 100}, MACHINE)["parts"] == 1
    turn = testing.attention_plan({**SHAPE, "tokens": 12, "total": 16384}, MACHINE)
    assert turn["few"] == 0
    assert turn["tasks"] >= 8
    prompt = testing.attention_plan({**SHAPE, "tokens": 4096}, MACHINE)
    assert (prompt["parts"], prompt["tile_tokens"], prompt["tasks"]) == (1, 64, 64)


@pytest.mark.parametrize("per_group", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("tokens", [2, 3, 4])
def test_plan_for_few_tokens_fills_tiles(per_group: int, tokens: int) -> None:
    """attend_few_rows takes them, in tiles of as many tokens as it allows; five tokens only if all their rows fit into
    one.
    """
    shape = {**SHAPE, "heads_per_group": per_group}
    plan = testing.attention_plan({**shape, "tokens": tokens}, MACHINE)
    assert plan["few"]
    assert plan["tile_tokens"] == min(tokens, MACHINE["few_rows"] // per_group)
    more = testing.attention_plan({**shape, "tokens": 5}, MACHINE)
    assert bool(more["few"]) == (5 * per_group <= MACHINE["few_rows"])


@pytest.mark.parametrize("cache", CACHE_TYPES)
@pytest.mark.parametrize("isa", ATTENTION_ISAS)
def test_scratch_of_a_tile_holds_tiles_of_fewer_rows(isa: str, cache: str) -> None:
    """The last tile of a prompt has fewer rows than the others, in the same memory."""
    for head_size, chunk_keys in product((16, 64, 72, 256), (32, 1024)):
        largest = 0
        for rows in range(1, 260):
            found = testing.attention_scratch(isa, cache, rows, head_size, chunk_keys)
            assert found >= largest, f"{rows} rows of {head_size} over {chunk_keys} keys"
            largest = found
