# SPDX-License-Identifier: Apache-2.0
"""Cases of the kernels that go row by row: RMS norms, rotation, ArgMax."""

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from flownpu.selftest.gpu.case import F32, Case, Expected

Rng = np.random.Generator

_MICROSOFT = "com.microsoft"
_EPSILON = 1e-6
_LANES = 64  # work-items that sum a row together


def rows() -> Iterator[tuple[str, Callable[[Rng], Case]]]:
    """Pairs of a case's name and the function that makes the case."""
    yield "rms_norm", partial(_norm, (2, 3, 77), None)
    yield "rms_norm, one element", partial(_norm, (3, 1), None)
    yield "rms_norm, residual", partial(_norm, (2, 3, 130), (2, 3, 130))
    yield "rms_norm, residual that repeats", partial(_norm, (2, 3, 65), (3, 65))
    yield "rotary_embedding, halves", partial(_rotation, 3, 26, 13)
    yield "rotary_embedding, interleaved", partial(_rotation, 3, 26, 13, interleaved=True)
    yield "rotary_embedding, a part of the head", partial(_rotation, 2, 30, 7)
    yield "argmax", partial(_argmax, 3, 1001)
    yield "argmax, equals", partial(_argmax, 2, 77, distinct=3)


def _norm(shape: tuple[int, ...], skip: tuple[int, ...] | None, rng: Rng) -> Case:
    x = rng.standard_normal(shape, dtype=np.float32)
    weight = rng.uniform(0.5, 1.5, shape[-1]).astype(np.float32)
    added = x.astype(np.float64)
    residual = None
    if skip is not None:
        residual = rng.standard_normal(skip, dtype=np.float32)
        added = added + residual
    y = added / np.sqrt(np.mean(added**2, axis=-1, keepdims=True) + _EPSILON) * weight
    # A term of the sum of squares takes part in a lane's additions, and in those of the tree over lanes; the root
    # halves their relative error. The square, quotients and roots (2.5 and 3 units) and three products: 12.
    additions = -(-shape[-1] // _LANES) + np.log2(_LANES)
    tolerance = (additions / 2 + 12) * F32 * np.abs(y)
    if residual is None:
        return Case(
            op_type="SimplifiedLayerNormalization", domain="", inputs=[x, weight],
            attributes={"axis": -1, "epsilon": _EPSILON}, expected={0: Expected(y, tolerance)},
        )  # fmt: skip
    # The sum with the residual is rounded, too; the norm keeps this error's relative size.
    return Case(
        op_type="SkipSimplifiedLayerNormalization", domain=_MICROSOFT, inputs=[x, residual, weight],
        attributes={"epsilon": _EPSILON}, outputs=["float", "", "", "float"],
        expected={0: Expected(y, tolerance + 2 * F32 * np.abs(y)), 3: Expected(added, F32 * np.abs(added))},
    )  # fmt: skip


def _rotation(heads: int, head_size: int, half: int, rng: Rng, *, interleaved: bool = False) -> Case:
    batch, tokens, positions = 2, 3, 11
    x = rng.standard_normal((batch, tokens, heads * head_size), dtype=np.float32)
    angles = rng.uniform(-np.pi, np.pi, (positions, half))
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    ids = rng.integers(0, positions, (batch, tokens))
    parts = x.astype(np.float64).reshape(batch, tokens, heads, head_size)
    first, second = (
        (slice(0, 2 * half, 2), slice(1, 2 * half, 2)) if interleaved else (slice(0, half), slice(half, 2 * half))
    )
    c, s = (table.astype(np.float64)[ids][:, :, None] for table in (cos, sin))
    y, magnitude = parts.copy(), np.zeros_like(parts)
    y[..., first] = parts[..., first] * c - parts[..., second] * s
    y[..., second] = parts[..., second] * c + parts[..., first] * s
    magnitude[..., first] = np.abs(parts[..., first] * c) + np.abs(parts[..., second] * s)
    magnitude[..., second] = np.abs(parts[..., second] * c) + np.abs(parts[..., first] * s)
    attributes = {"interleaved": int(interleaved), "num_heads": heads}
    if 2 * half < head_size:
        attributes["rotary_embedding_dim"] = 2 * half
    # Roundings of a product and of a sum; elements that are not rotated are exact.
    return Case(
        op_type="RotaryEmbedding", domain=_MICROSOFT, inputs=[x, ids, cos, sin], attributes=attributes,
        expected={0: Expected(y.reshape(x.shape), 2 * F32 * magnitude.reshape(x.shape))},
    )  # fmt: skip


def _argmax(count: int, columns: int, rng: Rng, *, distinct: int | None = None) -> Case:
    x = rng.standard_normal((count, columns), dtype=np.float32)
    if distinct is not None:
        x = rng.integers(0, distinct, (count, columns)).astype(np.float32)
    expected = np.argmax(x, axis=-1).astype(np.float64)
    return Case(
        op_type="ArgMax", domain="", inputs=[x], attributes={"axis": -1, "keepdims": 0}, outputs=["int64"],
        expected={0: Expected(expected, 0.0)},
    )  # fmt: skip
