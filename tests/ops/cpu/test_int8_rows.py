# SPDX-License-Identifier: Apache-2.0
"""Rows of an int8 KV cache on the CPU: the definition's bits, and refusals."""

import numpy as np
import pytest

from flownpu.ops.definitions.int8_cache import quantise_rows
from tests.ops.device import ISAS, Node, run


def hard_rows(size: int) -> np.ndarray:
    """Rows [n, size] of all magnitudes, with ties, the ends of float32's range, NaN and infinities."""
    rng = np.random.default_rng(6)
    rows = rng.standard_normal((200, size)) * 2.0 ** rng.uniform(-60, 60, (200, 1))
    # With a largest element of 127 the scale is 1, and all other elements are ties.
    rows[:9] = np.arange(size) - size // 2 + 0.5
    rows[:9, 0] = 127
    rows[9:12] = np.linspace(-1, 1, size) * [[2.0**-122], [2.0**-119], [3.4e38]]
    rows[12] = 0
    rows = rows.astype(np.float32)
    rows[13:16, size // 2] = np.nan, np.inf, -np.inf
    return rows


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("size", [8, 33, 64, 80])
def test_rows_have_definition_s_bits(isa: str, size: int) -> None:
    rows = hard_rows(size)
    query = np.zeros((1, len(rows), size), np.float32)
    past = [np.zeros((1, 1, 0, size + 4), np.int8) for _ in range(2)]
    lengths = [np.array([len(rows) - 1], np.int32), np.array(len(rows), np.int32)]
    sizes = {"num_heads": 1, "kv_num_heads": 1, "head_size": size}
    _, keys, values = run(
        "FlowQKVAttention",
        [query, rows[None], rows[None, ::-1].copy(), *past, *lengths],
        outputs=("float", "int8", "int8"),
        options={"cpu_isa": isa},
        **sizes,
    )
    assert keys is not None
    assert values is not None
    np.testing.assert_array_equal(keys[0, 0], quantise_rows(rows))
    np.testing.assert_array_equal(values[0, 0], quantise_rows(rows[::-1]))


@pytest.mark.parametrize("columns", [64, 66])
def test_rows_of_another_length_are_refused(columns: int) -> None:
    query = np.zeros((1, 1, 3 * 64), np.float32)
    past = [np.zeros((1, 1, 9, columns), np.int8) for _ in range(2)]
    inputs = [query, None, None, *past, np.array([4], np.int32), np.array(5, np.int32)]
    node = Node("FlowQKVAttention", inputs, ("float", "int8", "int8"), num_heads=1, kv_num_heads=1, head_size=64)
    with pytest.raises(ValueError, match=r"shape \[1,1,\?,68\], got .*codes and 4 bytes of scale"):
        node.infer(*inputs)
