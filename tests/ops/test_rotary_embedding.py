# SPDX-License-Identifier: Apache-2.0
"""com.microsoft RotaryEmbedding on the CPU device, against a rotation in float64."""

from __future__ import annotations

import numpy as np
import pytest

from tests.ops.device import run

EPSILON = 2.0**-24
B, S, H, D, POSITIONS = 2, 5, 3, 16, 40


def tables(half: int) -> tuple[np.ndarray, np.ndarray]:
    angles = np.outer(np.arange(POSITIONS), 100.0 ** (-np.arange(half) / half))
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def rotated(x: np.ndarray, positions: np.ndarray, half: int, interleaved: bool) -> np.ndarray:
    """Of x [B, S, H, D]: the pairs of the first 2 half elements of a head, as products of complex numbers."""
    cos, sin = (table.astype(np.float64)[positions][:, :, None] for table in tables(half))
    front = x[..., : 2 * half].astype(np.float64)
    real, imaginary = (front[..., ::2], front[..., 1::2]) if interleaved else (front[..., :half], front[..., half:])
    turned = (real + 1j * imaginary) * (cos + 1j * sin)
    pairs = [turned.real, turned.imag]
    whole = np.stack(pairs, -1).reshape(front.shape) if interleaved else np.concatenate(pairs, -1)
    return np.concatenate([whole, x[..., 2 * half :]], axis=-1)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("half", [8, 4])
@pytest.mark.parametrize("by_head", [False, True], ids=["[B, S, H d]", "[B, H, S, d]"])
@pytest.mark.parametrize("each", [False, True], ids=["first position", "positions"])
def test_is_a_rotation(each: bool, by_head: bool, half: int, interleaved: bool) -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((B, S, H, D), dtype=np.float32)
    ids = rng.integers(0, POSITIONS, (B, S)) if each else np.array([7])
    positions = ids if each else np.tile(7 + np.arange(S), (B, 1))
    attributes = {} if 2 * half == D else {"rotary_embedding_dim": 2 * half, "num_heads": H}
    given = np.ascontiguousarray(x.swapaxes(1, 2)) if by_head else x.reshape(B, S, -1)
    (output,) = run(
        "RotaryEmbedding",
        [given, ids, *tables(half)],
        domain="com.microsoft",
        interleaved=int(interleaved),
        **attributes,
    )
    assert output is not None
    output = output.swapaxes(1, 2) if by_head else output.reshape(x.shape)
    # Two products and their sum, each rounded once.
    bound = 3 * EPSILON * 2 * np.abs(x).max()
    np.testing.assert_allclose(output, rotated(x, positions, half, interleaved), rtol=0, atol=bound)


def test_what_does_not_fit_is_refused() -> None:
    x, ids = np.zeros((1, S, H * D), np.float32), np.arange(S)[None]
    for inputs, attributes, message in (
        ([x, ids + POSITIONS - S + 1, *tables(8)], {}, f"expected positions below {POSITIONS}, .* got {POSITIONS}"),
        (
            [x, np.array([POSITIONS - S + 1]), *tables(8)],
            {},
            f"expected positions below {POSITIONS}, .* got {POSITIONS}",
        ),
        ([x, ids[:, :-1].copy(), *tables(8)], {}, r"expected position_ids of shape \[1\] or \[1,5\], got \[1,4\]"),
        ([x, ids, *tables(7)], {}, r"expected \[batch, tokens, heads 14\]"),
        ([x, ids, *tables(8)], {"rotary_embedding_dim": 8, "num_heads": H}, "half the elements that are rotated"),
        ([x, ids, *tables(4)], {"rotary_embedding_dim": 8}, "expected num_heads with rotary_embedding_dim = 8"),
        ([x, ids, *tables(8)], {"scale": 2.0}, "expected scale = 1 and no packed batches"),
    ):
        with pytest.raises(RuntimeError, match=message):
            run("RotaryEmbedding", inputs, domain="com.microsoft", **attributes)
