# SPDX-License-Identifier: Apache-2.0
"""RotaryEmbedding, of com.microsoft and of ONNX, on the CPU device: empty tensors, and refusals."""

import numpy as np
import pytest

from tests.ops.device import run

S, H, D, POSITIONS = 5, 3, 16, 40


def tables(half: int) -> tuple[np.ndarray, np.ndarray]:
    angles = np.outer(np.arange(POSITIONS), 100.0 ** (-np.arange(half) / max(half, 1)))
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


@pytest.mark.parametrize(
    ("shape", "ids"),
    [
        pytest.param((0, S, H * D), np.zeros((0, S), np.int64), id="no rows"),
        pytest.param((2, 0, H * D), np.zeros((2, 0), np.int64), id="no tokens"),
        pytest.param((2, 0, H * D), np.array([POSITIONS]), id="no tokens, beyond the tables"),
        pytest.param((2, S, 0), np.zeros((2, S), np.int64), id="no heads"),
        pytest.param((2, 0, S, D), np.array(3), id="no heads, by head"),
        pytest.param((2, H, 0, D), np.zeros((2, 0), np.int64), id="no tokens, by head"),
    ],
)
def test_empty_rotary_embedding_keeps_shape(shape: tuple[int, ...], ids: np.ndarray) -> None:
    (output,) = run("RotaryEmbedding", [np.zeros(shape, np.float32), ids, *tables(8)], domain="com.microsoft")
    assert output is not None
    assert output.shape == shape


def test_rotary_embedding_with_unfit_inputs_is_refused() -> None:
    x, ids = np.zeros((1, S, H * D), np.float32), np.arange(S)[None]
    beyond = f"expected positions below {POSITIONS}, .* got "
    shape = r"expected position_ids of shape \[1\] or \[1,5\], got "
    half = "half the elements that are rotated"
    for inputs, attributes, message in (
        ([x, ids + POSITIONS - S + 1, *tables(8)], {}, f"{beyond}{POSITIONS}"),
        ([x, ids - 1, *tables(8)], {}, f"{beyond}-1"),
        ([x, np.array([POSITIONS - S + 1]), *tables(8)], {}, f"{beyond}{POSITIONS}"),
        ([x, np.array([2**63 - 1]), *tables(8)], {}, f"{beyond}{2**63 - 1}"),
        ([x, np.array([-(2**63)]), *tables(8)], {}, f"{beyond}-{2**63}"),
        ([x, ids[:, :-1].copy(), *tables(8)], {}, rf"{shape}\[1,4\]"),
        # The one position that all tokens count on from has shape [1]; [1,1] is refused.
        ([x, ids[:, :1].copy(), *tables(8)], {}, rf"{shape}\[1,1\]"),
        ([x, ids[0], *tables(8)], {}, rf"{shape}\[5\]"),
        ([x[0], ids, *tables(8)], {}, r"expected \[batch, tokens, heads d\] .*, got \[5,48\]"),
        ([x, ids, *tables(7)], {}, r"expected heads of at least 14 elements, .*, got \[1,5,48\] in heads of 14"),
        ([x, ids, *tables(8)], {"num_heads": 5}, "which there are 0"),
        # Tables for a head of 16 where one has 8; and wider ones than a head.
        ([x, ids, *tables(8)], {"num_heads": 2 * H}, f"{half}, of which there are 8"),
        ([x.reshape(1, H, S, D), ids, *tables(4)], {}, f"{half}, of which there are 16"),
        ([x.reshape(1, H, S, D), ids, *tables(16)], {}, f"{half}, of which there are 16"),
        ([x, ids, *tables(0)], {}, r"expected heads of at least 0 elements"),
        ([x, ids, *tables(8)], {"rotary_embedding_dim": 8, "num_heads": H}, f"{half}, of which there are 8"),
        ([x, ids, *tables(16)], {"rotary_embedding_dim": 32, "num_heads": H}, "heads of at least 32 elements"),
        ([x, ids, *tables(4)], {"rotary_embedding_dim": 8}, "expected num_heads with rotary_embedding_dim = 8"),
        ([x, ids, *tables(4)], {"rotary_embedding_dim": 9, "num_heads": H}, "an even rotary_embedding_dim, got 9"),
        ([x, ids, *tables(8)], {"scale": 2.0}, "scale.* 1, got 2"),
        ([x, ids, *tables(8)], {"interleaved": 2}, "interleaved.* 1, got 2"),
        ([x, ids.astype(np.int32), *tables(8)], {}, "position_ids.*int64, got int32"),
    ):
        with pytest.raises(ValueError, match=message):
            run("RotaryEmbedding", inputs, domain="com.microsoft", **attributes)
