# SPDX-License-Identifier: Apache-2.0
"""Conv and FusedConv on the CPU, for every instruction set of this machine, against onnx's reference in float64."""

from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.one_node import by_reference
from tests.ops.device import ISAS, one

RNG = np.random.default_rng(0)
PADS = [1, 1, 1, 1]
# Name: sizes of the images, of the weight, and attributes. Up to 8 channels of the result in a group are sums of lines;
# up to 4 channels of the images in a group are not rounded.
CASES: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "3 x 3 with pads": ((2, 20, 9, 11), (40, 20, 3, 3), {"pads": [1, 1, 1, 1]}),
    "pixels": ((2, 64, 5, 7), (33, 64, 1, 1), {}),
    "pixels of odd channels": ((3, 13, 5, 7), (33, 13, 1, 1), {}),
    "strides": ((1, 12, 10, 9), (16, 12, 3, 3), {"strides": [2, 2], "pads": [1, 0, 0, 1]}),
    "strided pixels": ((2, 16, 6, 7), (9, 16, 1, 1), {"strides": [2, 3]}),
    "dilations": ((1, 10, 12, 13), (12, 10, 3, 2), {"dilations": [2, 3], "pads": [2, 1, 0, 3]}),
    "pads wider than the window": ((1, 8, 3, 2), (16, 8, 2, 2), {"pads": [3, 4, 3, 4]}),
    "same, upper": ((1, 8, 7, 6), (10, 8, 4, 3), {"auto_pad": "SAME_UPPER", "strides": [2, 2]}),
    "same, lower": ((1, 8, 7, 6), (10, 8, 4, 3), {"auto_pad": "SAME_LOWER", "strides": [3, 1]}),
    "groups": ((2, 24, 6, 5), (36, 8, 3, 3), {"group": 3, "pads": [1, 1, 1, 1]}),
    "depthwise": ((2, 24, 9, 17), (24, 1, 3, 3), {"group": 24, "pads": [1, 1, 1, 1]}),
    "depthwise with strides": ((1, 6, 9, 17), (12, 1, 3, 5), {"group": 6, "strides": [2, 2], "dilations": [1, 2]}),
    "few channels of the result": ((2, 40, 8, 8), (4, 40, 3, 3), {"pads": [1, 1, 1, 1]}),
    "few channels of the images": ((2, 3, 13, 12), (40, 3, 4, 4), {"strides": [4, 4]}),
    "one axis": ((2, 12, 50), (24, 12, 5), {"pads": [2, 2], "strides": [2]}),
    "three axes": ((1, 9, 4, 5, 6), (16, 9, 2, 3, 2), {"pads": [1, 1, 0, 0, 1, 1]}),
    "no images": ((0, 8, 5, 5), (16, 8, 3, 3), {}),
}
# Those that Winograd's transforms compute: 32 channels and more. The last one's tiles are made in two parts.
WINOGRAD: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "odd sizes": ((2, 40, 7, 9), (33, 40, 3, 3), {"pads": [1, 1, 1, 1]}),
    "no pads": ((1, 32, 6, 5), (64, 32, 3, 3), {}),
    "unlike pads": ((1, 32, 3, 4), (32, 32, 3, 3), {"pads": [0, 2, 3, 1]}),
    "groups": ((2, 96, 6, 5), (64, 48, 3, 3), {"group": 2, "pads": [1, 1, 1, 1]}),
    "a pixel": ((3, 32, 1, 1), (32, 32, 3, 3), {"pads": [1, 1, 1, 1]}),
    "strips": ((2, 64, 131, 126), (32, 64, 3, 3), {"pads": [1, 1, 1, 1]}),
}


def normal(shape: tuple[int, ...]) -> np.ndarray:
    return RNG.standard_normal(shape, dtype=np.float32)


def bound(x: np.ndarray, weight: np.ndarray, isa: str, attributes: dict[str, Any]) -> np.ndarray:
    """The largest error of each number: sums of K terms in f32 and, in bf16, two roundings of 2^-8 each (and f32's)."""
    rounds = isa == "avx512" and weight.shape[0] // attributes.get("group", 1) > 8 and weight.shape[1] > 4
    (size,) = by_reference("Conv", [np.abs(x), np.abs(weight)], 1, opset=22, **attributes)
    terms = np.prod(weight.shape[1:]) + 2
    return np.asarray(size) * (terms * 2.0**-24 + (2.01 * 2.0**-8 if rounds else 0)) + 1e-6


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("case", CASES)
def test_convolution_equals_reference(case: str, isa: str) -> None:
    of_images, of_weight, attributes = CASES[case]
    x, weight, bias = normal(of_images), normal(of_weight), normal(of_weight[:1])
    wide = [array.astype(np.float64) for array in (x, weight, bias)]
    (expected,) = by_reference("Conv", wide, 1, opset=22, **attributes)
    found = one("Conv", [x, weight, bias], domain="", constants=(1, 2), options={"cpu_isa": isa}, **attributes)
    assert found.shape == expected.shape
    assert np.all(np.abs(found - expected) <= bound(wide[0], wide[1], isa, attributes))


# The absolute numbers of the transforms of ops/cpu/kernels/winograd.cc: of pixels, of taps and of products.
TILES = [
    ([[1, 0, 1, 0], [0, 1, 1, 0], [0, 1, 1, 0], [0, 1, 0, 1]], [[1, 0, 0], [0.5] * 3, [0.5] * 3, [0, 0, 1]],
     [[1, 1, 1, 0], [0, 1, 1, 1]]),
    ([[1, 1, 0], [0, 1, 0], [0, 1, 1]], [[1, 0, 0], [1, 1, 1], [0, 0, 1]], [[1, 1, 0], [0, 1, 1]]),
]  # fmt: skip


def winograd_sizes(
    x: np.ndarray, weight: np.ndarray, pads: list[int], groups: int = 1, *, upsampled: bool = False
) -> np.ndarray:
    """The same sums for tiles of 4 x 4 (3 x 3 if `upsampled`) pixels: sizes go through the transforms without signs.

    A sum of four pixels and one of nine taps are rounded a few times in f32 and, in bf16, once more; up to nine
    products, of C terms each, make a pixel.
    """
    into, of_weight, out = (np.array(matrix, np.float64) for matrix in TILES[upsampled])
    step = 1 if upsampled else 2
    height, width = ((size + pads[axis] + pads[axis + 2] - 2) * 2 // step for axis, size in enumerate(x.shape[2:]))
    rest = [(pads[axis], pads[axis + 2] + size % 2) for axis, size in enumerate((height, width))]
    padded = np.pad(np.abs(x), [(0, 0), (0, 0), *rest])
    tiles = np.lib.stride_tricks.sliding_window_view(padded, into.shape, (2, 3))[:, :, ::step, ::step]
    tiles = into @ tiles @ into.T
    taps = of_weight @ np.abs(weight) @ of_weight.T
    parts = zip(np.split(tiles, groups, 1), np.split(taps, groups), strict=True)
    sizes = np.concatenate([np.einsum("nctuij,mcij->nmtuij", *part, optimize=True) for part in parts], 1)
    pixels = (out @ sizes @ out.T).transpose(0, 1, 2, 4, 3, 5)
    count, channels, lines, _, columns, _ = pixels.shape
    sizes: np.ndarray = pixels.reshape(count, channels, 2 * lines, 2 * columns)[:, :, :height, :width]
    return sizes


def winograd_bound(sizes: np.ndarray, channels: int, isa: str) -> np.ndarray:
    """The largest error of each number, given `winograd_sizes` and how many channels are summed."""
    return np.asarray(sizes * ((channels + 20) * 2.0**-24 + (2.01 * 2.0**-8 if isa == "avx512" else 0)) + 1e-6)


@cache  # references take longer than kernels
def upsampled_case(sizes: tuple[int, ...]) -> tuple[np.ndarray, ...]:
    """Images, weight, bias, the convolution, and its sizes."""
    count, height, width, channels, m = sizes
    x, weight, bias = normal((count, channels, height, width)), normal((m, channels, 3, 3)), normal((m,))
    wide = [array.astype(np.float64) for array in (x.repeat(2, 2).repeat(2, 3), weight, bias)]
    (expected,) = by_reference("Conv", wide, 1, opset=22, pads=PADS)
    return x, weight, bias, expected, winograd_sizes(x.astype(np.float64), wide[1], PADS, upsampled=True)


@cache
def winograd_case(case: str) -> tuple[np.ndarray, ...]:
    """The same of WINOGRAD."""
    of_images, of_weight, attributes = WINOGRAD[case]
    x, weight, bias = normal(of_images), normal(of_weight), normal(of_weight[:1])
    wide = [array.astype(np.float64) for array in (x, weight, bias)]
    (expected,) = by_reference("Conv", wide, 1, opset=22, **attributes)
    pads, groups = attributes.get("pads", [0] * 4), attributes.get("group", 1)
    return x, weight, bias, expected, winograd_sizes(wide[0], wide[1], pads, groups)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("sizes", [(3, 7, 5, 40, 33), (1, 130, 70, 64, 32)], ids=["odd sizes", "strips"])
def test_convolution_of_images_read_twice_as_large_equals_reference(sizes: tuple[int, ...], isa: str) -> None:
    x, weight, bias, expected, summed = upsampled_case(sizes)
    z = normal(expected.shape)
    found = one(
        "FusedConv", [x, weight, bias, z], domain="com.microsoft", constants=(1, 2), options={"cpu_isa": isa},
        pads=PADS, upsample=2, activation="Relu",
    )  # fmt: skip
    largest = winograd_bound(summed, weight.shape[1], isa)
    assert np.all(np.abs(found - np.maximum(expected + z, 0)) <= largest)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("case", WINOGRAD)
def test_winograd_convolution_equals_reference(case: str, isa: str) -> None:
    x, weight, bias, expected, summed = winograd_case(case)
    found = one("Conv", [x, weight, bias], domain="", constants=(1, 2), options={"cpu_isa": isa}, **WINOGRAD[case][2])
    assert found.shape == expected.shape
    assert np.all(np.abs(found - expected) <= winograd_bound(summed, weight.shape[1], isa))


@pytest.mark.skipif("avx512" not in ISAS, reason="only there products are in bf16")
def test_winograd_rounding_is_five_thirds_of_the_windows() -> None:
    """Bounds without signs are wide: the error's root mean square is what ops/cpu/images/winograd.h derives."""
    x, weight = normal((2, 64, 32, 32)), normal((64, 64, 3, 3))
    (expected,) = by_reference("Conv", [x.astype(np.float64), weight.astype(np.float64)], 1, opset=22)
    found = one("Conv", [x, weight], domain="", constants=(1,), options={"cpu_isa": "avx512"})
    error = np.sqrt(np.square(found - expected).mean() / np.square(expected).mean())
    rounding = [np.square(of.astype(ml_dtypes.bfloat16) - of).mean() / np.square(of).mean() for of in (x, weight)]
    assert 1.6 < error / np.sqrt(sum(rounding)) < 1.75


@pytest.mark.parametrize("channels", [40, 4])
@pytest.mark.parametrize("activation", [None, "Relu"])
def test_fused_convolution_adds_z_before_its_activation(activation: str | None, channels: int) -> None:
    x, weight, z = normal((2, 8, 6, 7)), normal((channels, 8, 3, 3)), normal((2, channels, 6, 7))
    wide = [array.astype(np.float64) for array in (x, weight)]
    pads: dict[str, Any] = {"pads": [1, 1, 1, 1]}
    expected = by_reference("Conv", wide, 1, opset=22, **pads)[0] + z
    given = {"activation": activation} if activation else {}
    found = one("FusedConv", [x, weight, None, z], domain="com.microsoft", constants=(1,), **pads, **given)
    if activation:
        expected = np.maximum(expected, 0)
    assert np.all(np.abs(found - expected) <= bound(wide[0], wide[1], "avx512", pads))


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("channels", [16, 4])
def test_convolution_of_narrow_floats_rounds_the_result_only(dtype: Any, channels: int) -> None:
    x, weight = normal((1, 8, 5, 5)).astype(dtype), normal((channels, 8, 3, 3)).astype(dtype)
    wide = [array.astype(np.float64) for array in (x, weight)]
    (expected,) = by_reference("Conv", wide, 1, opset=22)
    name = "float16" if dtype == np.float16 else "bfloat16"
    found = one("Conv", [x, weight], domain="", constants=(1,), outputs=(name,)).astype(np.float64)
    rounding = np.abs(expected) * float(ml_dtypes.finfo(dtype).eps) / 2
    assert np.all(np.abs(found - expected) <= bound(wide[0], wide[1], "avx512", {}) + rounding * 1.01)


@pytest.mark.parametrize(
    ("images", "weight", "attributes", "message"),
    [
        ((1, 4, 5, 5), (8, 3, 3, 3), {}, "expected images of 3 channels and 2 axes after two others"),
        ((1, 3, 5), (8, 3, 3, 3), {}, "expected images of 3 channels and 2 axes after two others"),
        ((1, 3, 5, 5), (8, 3, 3, 3), {"kernel_shape": [3, 2]}, "expected kernel_shape to be that of the weight"),
        ((1, 4, 5, 5), (9, 2, 3, 3), {"group": 2}, "expected a weight for each of 2 groups"),
        ((1, 3, 5, 5), (8, 3, 3, 3), {"pads": [1, 1]}, "expected 4 numbers in pads, got 2"),
        ((1, 3, 5, 5), (8, 3, 7, 3), {}, "expected images of at least one window of 7, got 5"),
        ((1, 3, 5), (8, 3), {}, r"expected a weight \[M, C / group, ..\] of known shape"),
    ],
)
def test_unfit_convolution_is_refused(
    images: tuple[int, ...], weight: tuple[int, ...], attributes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        one("Conv", [normal(images), normal(weight)], domain="", constants=(1,), **attributes)
