# SPDX-License-Identifier: Apache-2.0
"""Resize on the CPU against ONNX Runtime's."""

from typing import Any

import numpy as np
import pytest

from tests.one_node import by_onnxruntime
from tests.ops.device import one

RNG = np.random.default_rng(0)
X = RNG.standard_normal((2, 3, 5, 7), dtype=np.float32)
COORDINATES = ["half_pixel", "asymmetric", "pytorch_half_pixel", "align_corners"]


def theirs(inputs: list[Any], attributes: dict[str, Any]) -> np.ndarray:
    return by_onnxruntime("Resize", inputs, [np.float32], opset=19, **attributes)[0]


@pytest.mark.parametrize("coordinates", COORDINATES)
@pytest.mark.parametrize("rounding", ["round_prefer_floor", "round_prefer_ceil", "floor", "ceil"])
@pytest.mark.parametrize("scales", [(1, 1, 2, 2), (1, 1, 3, 0.5), (1, 2, 1.5, 1)])
def test_nearest_pixels_equal_those_of_onnxruntime(coordinates: str, rounding: str, scales: tuple[float, ...]) -> None:
    inputs = [X, None, np.array(scales, np.float32)]
    attributes = {"mode": "nearest", "coordinate_transformation_mode": coordinates, "nearest_mode": rounding}
    np.testing.assert_array_equal(
        one("Resize", inputs, domain="", **attributes),
        theirs(inputs, attributes),
    )


def test_resize_of_some_axes_leaves_the_others() -> None:
    inputs = [X, None, np.array([3, 2], np.float32)]
    attributes = {"axes": [-1, 2], "mode": "nearest"}
    np.testing.assert_array_equal(
        one("Resize", inputs, domain="", **attributes),
        theirs(inputs, attributes),
    )


@pytest.mark.parametrize("coordinates", COORDINATES)
@pytest.mark.parametrize("sizes", [(2, 3, 10, 14), (2, 3, 1, 9), (2, 3, 5, 3)])
def test_linear_resize_to_sizes_equals_that_of_onnxruntime(coordinates: str, sizes: tuple[int, ...]) -> None:
    inputs = [X, None, None, np.array(sizes, np.int64)]
    attributes = {"mode": "linear", "coordinate_transformation_mode": coordinates}
    # ONNX Runtime computes places in float32, off by a few 2^-24 of a place up to 7; numbers differ by 6 at most.
    np.testing.assert_allclose(
        one("Resize", inputs, domain="", **attributes),
        theirs(inputs, attributes),
        rtol=0,
        atol=6 * 2 * 7 * 4 * 2.0**-24,
    )


@pytest.mark.parametrize("coordinates", ["half_pixel", "align_corners"])
def test_linear_resize_beside_infinite_pixels_equals_that_of_onnxruntime(coordinates: str) -> None:
    x = X[:1, :1].copy()
    x[..., 2, 3], x[..., -1, -1], x[..., 0, 0] = np.inf, -np.inf, np.inf
    attributes = {"mode": "linear", "coordinate_transformation_mode": coordinates}
    for scales in [(1, 1, 1, 1), (1, 1, 2, 2), (1, 1, 1, 2), (1, 1, 2, 1)]:
        inputs = [x, None, np.array(scales, np.float32)]
        found, expected = (
            one("Resize", inputs, domain="", **attributes),
            theirs(inputs, attributes),
        )
        assert np.isinf(expected).any()
        assert not np.isnan(found).any()
        # The bound of the test above. Where a place lies on a pixel, ONNX Runtime multiplies the next by 0.
        known = ~np.isnan(expected)
        np.testing.assert_allclose(found[known], expected[known], rtol=0, atol=6 * 2 * 7 * 4 * 2.0**-24)


@pytest.mark.parametrize(
    ("inputs", "attributes", "message"),
    [
        ([X, None, np.ones(3, np.float32)], {}, "expected a scale or a size for each of 4 axes"),
        ([X, None, np.array([1, 1, 0, 1], np.float32)], {}, "expected scales above 0"),
        ([X, None, np.array([1, 2, 1, 1], np.float32)], {"mode": "linear"}, "along the last two axes only"),
        ([X, None, np.ones(4, np.float32)], {"mode": "cubic"}, "expected one of nearest.linear, got 'cubic'"),
    ],
)
def test_unfit_resize_is_refused(inputs: list[Any], attributes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        one("Resize", inputs, domain="", **attributes)
