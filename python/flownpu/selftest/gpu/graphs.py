# SPDX-License-Identifier: Apache-2.0
"""Cases of graphs' operators: convolutions, norms with a mean, attention over other tokens, functions, moves."""

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from flownpu.selftest.gpu.case import F32, Case, Expected

Rng = np.random.Generator

_MICROSOFT = "com.microsoft"
# Errors of exp, erf, sin, tanh and pow in units in the last place are at most 3, 16, 4, 5 and 16 (OpenCL's bounds),
# each of which is 2 F32; the functions here have up to 4 operations around them.
_FUNCTION = 2 * 16 + 4
_LANES = 256  # work-items that sum a norm's row together


def graphs() -> Iterator[tuple[str, Callable[[Rng], Case]]]:
    """Pairs of a case's name and the function that makes the case."""
    yield "convolution", partial(_convolution, (2, 5, 9, 11), (37, 5, 3, 3), pads=[1, 1, 1, 1])
    yield "convolution, strides", partial(_convolution, (1, 3, 10, 9), (4, 3, 3, 2), strides=[2, 3], pads=[0, 1, 2, 0])
    yield "convolution, dilations", partial(_convolution, (1, 2, 9, 9), (3, 2, 3, 3), dilations=[2, 3])
    yield "convolution, groups", partial(_convolution, (2, 6, 5, 5), (4, 3, 3, 3), group=2)
    yield "convolution, pixels", partial(_convolution, (2, 33, 4, 4), (35, 33, 1, 1))
    yield "convolution, one axis", partial(_convolution, (2, 3, 17), (5, 3, 4), pads=[3, 0])
    yield "convolution, sum and relu", partial(_convolution, (1, 4, 6, 6), (8, 4, 3, 3), sums=True)
    upsampled = partial(_convolution, (2, 3, 4, 5), (4, 3, 3, 3), sums=True, upsample=2, pads=[1, 1, 1, 1])
    yield "convolution, read twice as large", upsampled
    by_winograd = partial(partial, _convolution, winograd=True)
    # Odd sizes, more tiles than a work-group has, rows and channels that are no multiples of its steps.
    yield "winograd", by_winograd((2, 6, 9, 11), (37, 6, 3, 3), pads=[1, 2, 1, 0])
    yield (
        "winograd, sums, groups, read twice as large",
        by_winograd((1, 8, 3, 4), (6, 4, 3, 3), sums=True, group=2, upsample=2, pads=[1, 1, 1, 1]),
    )
    yield "layer_norm", partial(_norm, (2, 3, 77), 0)
    yield "layer_norm, groups", partial(_norm, (2, 12, 5, 7), 3)
    yield "layer_norm, groups and silu", partial(_norm, (2, 12, 5, 7), 4, silu=True)
    yield "layer_norm, channels", partial(_norm, (2, 3, 40), 3)
    yield "softmax", partial(_softmax, (2, 3, 133))
    yield "activations_matmul", partial(_matmul, (3, 2, 35, 19), (3, 2, 19, 70))
    yield "activations_matmul, one right factor", partial(_matmul, (4, 3, 5), (5, 7))
    yield "flow_attention, whole, by head", partial(_attention, 2, 9, 13, 40, by_head=True)
    yield "flow_attention, whole, by token", partial(_attention, 3, 70, 7, 10)
    yield "flow_attention, whole, text's 77 tokens", partial(_attention, 2, 5, 77, 160)
    yield "flow_attention, whole, head of 512", partial(_attention, 1, 9, 70, 512)
    yield "flow_attention, whole, causal", partial(_attention, 2, 19, 19, 24, causal=True)
    yield "flow_attention, whole, mask", partial(_attention, 2, 9, 13, 40, by_head=True, mask=(2, 1, 9, 13))
    yield "flow_attention, whole, mask of keys", partial(_attention, 2, 9, 140, 8, mask=(1, 140), boolean=True)
    for name, function in _FUNCTIONS.items():
        yield f"elementwise, {name}", partial(_function, name, function)
    yield "elementwise, sums that broadcast", partial(_sum, (2, 3, 4, 5), (3, 1, 5))
    yield "elementwise, sums of a column", partial(_sum, (1, 7, 1), (6, 1, 9))
    yield "elementwise, Concat", _joined
    yield "elementwise, Split", _parted
    for name, of, attributes, more, move in _MOVES:
        yield f"elementwise, {name}", partial(_moved, name.split(",")[0], of, attributes, more, move)


_erf = np.vectorize(math.erf)
_FUNCTIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "Abs": np.abs,
    "Cos": np.cos,
    "Erf": _erf,
    "Exp": np.exp,
    "Gelu": lambda x: 0.5 * x * (1 + _erf(x * 0.5**0.5)),
    "Log": np.log,
    "Neg": np.negative,
    "QuickGelu": lambda x: x / (1 + np.exp(-1.702 * x)),
    "Reciprocal": np.reciprocal,
    "Relu": lambda x: np.maximum(x, 0),
    "Sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "Sin": np.sin,
    "Sqrt": np.sqrt,
    "Swish": lambda x: x / (1 + np.exp(-x)),
    "Tanh": np.tanh,
}
_OF_POSITIVES = {"Log", "Sqrt", "Reciprocal"}

_Move = Callable[[np.ndarray], np.ndarray]
# Name, shape, attributes, more inputs, the move.
_MOVES: list[tuple[str, tuple[int, ...], dict[str, Any], list[np.ndarray | None], _Move]] = [
    ("Transpose", (2, 3, 4, 5), {"perm": [0, 2, 3, 1]}, [], lambda x: x.transpose(0, 2, 3, 1)),
    ("Reshape", (2, 3, 4), {}, [np.array([4, -1])], lambda x: x.reshape(4, 6)),
    ("Expand", (3, 1, 4), {}, [np.array([2, 3, 5, 4])], lambda x: np.broadcast_to(x, (2, 3, 5, 4))),
    (
        "Slice", (4, 9, 3), {}, [np.array([8, 1]), np.array([-100, 9]), np.array([1, 0]), np.array([-3, 2])],
        lambda x: x[1::2, ::-3],
    ),
    (
        "Resize, asymmetric", (1, 2, 3, 2), {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"},
        [None, np.array([1, 1, 2, 3], np.float32)], lambda x: x.repeat(2, axis=2).repeat(3, axis=3),
    ),
    (
        "Resize, half pixels", (1, 2, 3, 2), {"coordinate_transformation_mode": "half_pixel"},
        [None, np.array([1, 1, 4, 2], np.float32)], lambda x: x.repeat(4, axis=2).repeat(2, axis=3),
    ),
]  # fmt: skip


def _convolution(
    image: tuple[int, ...],
    kernel: tuple[int, ...],
    rng: Rng,
    *,
    sums: bool = False,
    group: int = 1,
    upsample: int = 1,
    winograd: bool = False,
    **windows: Any,
) -> Case:
    x, w = (rng.standard_normal(shape, dtype=np.float32) for shape in (image, kernel))
    bias = rng.standard_normal(kernel[0], dtype=np.float32)
    read = x.repeat(upsample, 2).repeat(upsample, 3) if upsample > 1 else x
    exact = _convolved(read.astype(np.float64), w.astype(np.float64), group, **windows)
    terms = _winograd_terms if winograd else _convolved
    magnitude = terms(np.abs(read).astype(np.float64), np.abs(w).astype(np.float64), group, **windows)
    by_channel = bias.reshape(-1, *[1] * (len(image) - 2))
    y = exact + by_channel
    # The sum is in order: each term takes part in at most as many additions as there are terms. With Winograd's
    # transforms there is one for each channel, whose factors round twice and four times, as the sums of the result do.
    additions = kernel[1] + 2 + 4 + 4 if winograd else math.prod(kernel[1:])
    tolerance = (additions + 2) * F32 * magnitude + F32 * np.abs(y)
    inputs, attributes, name = [x, w, bias], {"group": group, **windows}, "Conv"
    if sums:
        residual = rng.standard_normal(y.shape, dtype=np.float32)
        y = y + residual
        tolerance = tolerance + F32 * np.abs(y)
        y = np.maximum(y, 0)
        inputs, name = [*inputs, residual], "FusedConv"
        attributes |= {"activation": "Relu", "upsample": upsample}
    return Case(
        name="", op_type=name, domain=_MICROSOFT if sums else "", inputs=inputs, constants=[1, 2],
        attributes=attributes, expected={0: Expected(y, tolerance)}, operations=2 * y.size * math.prod(kernel[1:]),
        options={"gpu_winograd": "on"} if winograd else {},
    )  # fmt: skip


def _winograd_terms(x: np.ndarray, w: np.ndarray, group: int, pads: list[int]) -> np.ndarray:
    """Sums of the magnitudes of all terms of Winograd's F(2 x 2, 3 x 3), for magnitudes of pixels and weights.

    They are |A|^T [sum over channels (|G| g |G|^T) * (|B|^T d |B|)] |A|, with the matrices of Lavin and Gray
    (arXiv:1509.09308).
    """
    to_tile = np.array([[1, 0, 1, 0], [0, 1, 1, 0], [0, 1, 1, 0], [0, 1, 0, 1]])
    to_taps = np.array([[1, 0, 0], [0.5, 0.5, 0.5], [0.5, 0.5, 0.5], [0, 0, 1]])
    to_result = np.array([[1, 1, 1, 0], [0, 1, 1, 1]])
    padded = np.pad(x, [(0, 0), (0, 0), (pads[0], pads[2]), (pads[1], pads[3])])
    height, width = (size - 2 for size in padded.shape[2:])
    padded = np.pad(padded, [(0, 0), (0, 0), (0, height % 2), (0, width % 2)])
    tiles = np.lib.stride_tricks.sliding_window_view(padded, (4, 4), (2, 3))[:, :, ::2, ::2]
    given = np.einsum("ij,...jk,lk->...il", to_tile, tiles, to_tile)
    weight = np.einsum("ij,...jk,lk->...il", to_taps, w, to_taps).reshape(group, -1, w.shape[1], 4, 4)
    given = given.reshape(len(x), group, -1, *given.shape[2:])
    products = np.einsum("gmcil,ngcyxil->ngmyxil", weight, given)
    pixels = np.einsum("ai,ngmyxil,bl->ngmyaxb", to_result, products, to_result)
    found: np.ndarray = pixels.reshape(len(x), len(w), 2 * tiles.shape[2], 2 * tiles.shape[3])[..., :height, :width]
    return found


def _convolved(x: np.ndarray, w: np.ndarray, group: int, **windows: list[int]) -> np.ndarray:
    """ONNX's Conv in float64: each tap's channels times the pixels that it sees."""
    axes = x.ndim - 2
    strides, dilations = (windows.get(name, [1] * axes) for name in ("strides", "dilations"))
    pads = windows.get("pads", [0] * (2 * axes))
    padded = np.pad(x, [(0, 0), (0, 0), *zip(pads[:axes], pads[axes:], strict=True)])
    counts = [
        (padded.shape[2 + i] - (w.shape[2 + i] - 1) * dilations[i] - 1) // strides[i] + 1 for i in range(axes)
    ]  # fmt: skip
    y = np.zeros((x.shape[0], w.shape[0], *counts))
    for tap in np.ndindex(*w.shape[2:]):
        at = tuple(
            slice(tap[i] * dilations[i], tap[i] * dilations[i] + (counts[i] - 1) * strides[i] + 1, strides[i])
            for i in range(axes)
        )  # fmt: skip
        seen = padded[(slice(None), slice(None), *at)].reshape(x.shape[0], group, -1, *counts)
        of_tap = w[(slice(None), slice(None), *tap)].reshape(group, -1, w.shape[1])
        y += np.einsum("gmc,ngc...->ngm...", of_tap, seen).reshape(y.shape)
    return y


def _norm(shape: tuple[int, ...], groups: int, rng: Rng, *, silu: bool = False) -> Case:
    x = rng.standard_normal(shape, dtype=np.float32) + 1
    count = shape[1] if groups else shape[-1]
    scale, shift = (rng.standard_normal(count, dtype=np.float32) for _ in range(2))
    rows = x.astype(np.float64).reshape((shape[0], groups, -1) if groups else (-1, shape[-1]))
    centred = rows - rows.mean(axis=-1, keepdims=True)
    deviation = np.sqrt((centred**2).mean(axis=-1, keepdims=True) + 1e-5)
    by_channel = (-1, *[1] * (len(shape) - 2)) if groups else (-1,)
    normed = (centred / deviation).reshape(shape) * scale.reshape(by_channel)
    y = normed + shift.reshape(by_channel)
    # A lane adds columns / lanes terms, then come two stages of sums of 16: so many roundings has the mean, of the mean
    # magnitude, and the variance, whose root halves them; products, quotient and root: 10.
    additions = rows.shape[-1] // _LANES + 32
    of_mean = additions * F32 * np.abs(rows).mean(axis=-1, keepdims=True) / deviation
    off = np.broadcast_to(of_mean, rows.shape).reshape(shape) * np.abs(scale.reshape(by_channel))
    tolerance = (additions / 2 + 10) * F32 * np.abs(normed) + 2 * off + F32 * np.abs(y)
    attributes: dict[str, Any] = {"epsilon": 1e-5}
    if silu:
        tolerance = 1.1 * tolerance + _FUNCTION * F32 * np.abs(y)  # the largest slope of SiLU
        y = y / (1 + np.exp(-y))
        attributes |= {"groups": groups, "activation": 1, "channels_last": 0}
    elif groups and groups != count:
        attributes |= {"num_groups": groups}
    names = ("LayerNormalization", "InstanceNormalization" if groups == count else "GroupNormalization")
    return Case(
        name="", op_type="GroupNorm" if silu else names[groups > 0], domain=_MICROSOFT if silu else "",
        inputs=[x, scale, shift], constants=[1, 2], attributes=attributes, expected={0: Expected(y, tolerance)},
    )  # fmt: skip


def _matmul(left: tuple[int, ...], right: tuple[int, ...], rng: Rng) -> Case:
    a, b = (rng.standard_normal(shape, dtype=np.float32) for shape in (left, right))
    magnitude = np.abs(a).astype(np.float64) @ np.abs(b)
    return Case(
        name="", op_type="MatMul", domain="", inputs=[a, b],
        expected={0: Expected(a.astype(np.float64) @ b, (left[-1] + 1) * F32 * magnitude)},
    )  # fmt: skip


def _attention(
    heads: int, tokens: int, keys: int, size: int, rng: Rng, *, by_head: bool = False, causal: bool = False,
    mask: tuple[int, ...] = (), boolean: bool = False,
) -> Case:  # fmt: skip
    q, k, v = (
        rng.standard_normal((2, heads, count, size), dtype=np.float32) for count in (tokens, keys, keys)
    )  # fmt: skip
    added = rng.standard_normal(mask, dtype=np.float32) if mask else np.zeros(1, np.float32)
    hidden = rng.random(mask) < 0.3 if boolean else np.zeros(1, bool)
    seen = np.tri(tokens, keys, dtype=bool) if causal else np.ones((tokens, keys), bool)
    scaled = q.astype(np.float64) * size**-0.5
    scores = scaled @ k.swapaxes(2, 3) + (0 if boolean else added)
    # A score is a sum of products with a scaled query, and the mask: its roundings. exp's error, and sums over keys.
    off = (size + 4) * F32 * (np.abs(scaled) @ np.abs(k.swapaxes(2, 3)) + np.abs(added).max()).max()
    scores = np.where(seen & ~hidden, scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    y = weights @ v
    tolerance = 2 * (2 * off + (2 * keys + 16) * F32) * (weights @ np.abs(v))

    def placed(array: np.ndarray) -> np.ndarray:
        return array if by_head else array.swapaxes(1, 2).reshape(2, -1, heads * size)

    inputs: list[np.ndarray | None] = [placed(part) for part in (q, k, v)]
    if mask:
        inputs.append(~hidden if boolean else added)
    attributes = {"is_causal": int(causal)} | ({} if by_head else {"q_num_heads": heads, "kv_num_heads": heads})
    return Case(
        name="", op_type="Attention", domain="", inputs=inputs, attributes=attributes,
        expected={0: Expected(placed(y), placed(tolerance))},
    )  # fmt: skip


def _softmax(shape: tuple[int, ...], rng: Rng) -> Case:
    x = rng.standard_normal(shape, dtype=np.float32) * 4
    powers = np.exp(x.astype(np.float64) - x.max(axis=-1, keepdims=True))
    y = powers / powers.sum(axis=-1, keepdims=True)
    # Roundings of the difference to the largest element, which exp keeps in size, of exp itself, and of the sum.
    relative = 2 * np.abs(x).max() + 2 * 6 + shape[-1] // 64 + 32
    return Case(
        name="", op_type="Softmax", domain="", inputs=[x], attributes={"axis": -1},
        expected={0: Expected(y, relative * F32 * y)},
    )  # fmt: skip


def _function(name: str, function: Callable[[np.ndarray], np.ndarray], rng: Rng) -> Case:
    x = rng.standard_normal((3, 29), dtype=np.float32)
    x = np.abs(x) + np.float32(0.1) if name in _OF_POSITIVES else x
    y = function(x.astype(np.float64))
    # A sum with 1 rounds beside numbers up to 1, and erf(x) is near -1 where GELU is small.
    tolerance = _FUNCTION * F32 * (np.abs(y) + np.abs(x) * (name == "Gelu"))
    return Case(
        name="", op_type=name, domain=_MICROSOFT if name == "QuickGelu" else "", inputs=[x],
        expected={0: Expected(y, tolerance)},
    )  # fmt: skip


def _sum(left: tuple[int, ...], right: tuple[int, ...], rng: Rng) -> Case:
    a, b = (rng.standard_normal(shape, dtype=np.float32) for shape in (left, right))
    y = a.astype(np.float64) + b
    return Case(name="", op_type="Add", domain="", inputs=[a, b], expected={0: Expected(y, F32 * np.abs(y))})


def _moved(
    name: str, shape: tuple[int, ...], attributes: dict[str, Any], more: list[np.ndarray | None], move: _Move, rng: Rng
) -> Case:
    x = rng.standard_normal(shape, dtype=np.float32)
    constants = [i + 1 for i, array in enumerate(more) if array is not None]
    return Case(
        name="", op_type=name, domain="", inputs=[x, *more], constants=constants, attributes=attributes,
        expected={0: Expected(move(x).astype(np.float64), 0.0)},
    )  # fmt: skip


def _joined(rng: Rng) -> Case:
    parts = [rng.standard_normal((2, size, 5), dtype=np.float32) for size in (3, 1, 4)]
    return Case(
        name="", op_type="Concat", domain="", inputs=parts, attributes={"axis": -2},
        expected={0: Expected(np.concatenate(parts, axis=1).astype(np.float64), 0.0)},
    )  # fmt: skip


def _parted(rng: Rng) -> Case:
    x = rng.standard_normal((2, 8, 5), dtype=np.float32)
    parts = np.split(x.astype(np.float64), [3, 4], axis=1)
    return Case(
        name="", op_type="Split", domain="", inputs=[x, np.array([3, 1, 4])], constants=[1], attributes={"axis": 1},
        outputs=["float"] * 3, expected={i: Expected(part, 0.0) for i, part in enumerate(parts)},
    )  # fmt: skip
