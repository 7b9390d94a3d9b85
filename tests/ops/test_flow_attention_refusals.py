# SPDX-License-Identifier: Apache-2.0
"""What FlowQKVAttention refuses: attributes when a node is made, inputs when it runs; each with its reason."""

from __future__ import annotations

import numpy as np
import pytest

from tests.ops.device import Node, run
from tests.ops.test_flow_attention import SIZES, D, G, H, rope_tables


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({**SIZES, "kv_num_heads": 3}, "num_heads to be a multiple of kv_num_heads, got 4 and 3"),
        ({**SIZES, "head_size": 1024}, "expected head_size in 1..512, got 1024"),
        ({**SIZES, "local_window_size": 8, "causal": 0}, "expected no local_window_size with causal = 0"),
        ({**SIZES, "sliding_window_cache": 1}, "expected local_window_size with sliding_window_cache = 1"),
        ({**SIZES, "do_rotary": 1}, "expected cos_cache and sin_cache with do_rotary = 1"),
    ],
)
def test_attributes_that_do_not_fit_are_refused(attributes: dict[str, int], message: str) -> None:
    query = np.zeros((1, 1, (H + 2 * G) * D), np.float32)
    with pytest.raises(RuntimeError, match=message):
        Node("FlowQKVAttention", [query], ("float",), **attributes)


def test_inputs_that_do_not_fit_are_refused() -> None:
    query = np.zeros((1, 4, (H + 2 * G) * D), np.float32)
    cache = np.zeros((1, G, 8, D), np.float32)
    total = np.array(12, np.int32)
    with pytest.raises(RuntimeError, match=r"expected a query of shape \[batch, tokens, 512\], got \[1,4,511\]"):
        run("FlowQKVAttention", [query[..., :-1].copy()], **SIZES)
    with pytest.raises(RuntimeError, match=r"expected past_key and past_value of shape \[1,2,\?,64\]"):
        run("FlowQKVAttention", [query, None, None, cache[:, :1].copy(), cache], **SIZES)
    with pytest.raises(RuntimeError, match=r"expected seqlens_k \+ 1 of row 0 between 4 and .* = 12, got 41"):
        run("FlowQKVAttention", [query, None, None, cache, cache, np.array([40], np.int32), total], **SIZES)
    tables = rope_tables(10)
    with pytest.raises(RuntimeError, match=r"expected positions below 10, .* got 11: shorten the context"):
        run(
            "FlowQKVAttention",
            [query, None, None, cache, cache, np.array([11], np.int32), total, *tables],
            do_rotary=1,
            **SIZES,
        )
    with pytest.raises(RuntimeError, match=r"a window-sized KV cache of at least 16 positions, got 8"):
        run(
            "FlowQKVAttention",
            [query, None, None, cache, cache],
            local_window_size=16,
            sliding_window_cache=1,
            **SIZES,
        )
