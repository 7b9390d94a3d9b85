# SPDX-License-Identifier: Apache-2.0
"""Samples of pools and pads, from ONNX's equations in NumPy."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.fuzz.reference.samples import Samples, Unknown, unit

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.fuzz.arrays import Array
    from tests.fuzz.reference.evaluate import Node, Table

# Sums of up to 1024 such numbers fit in float32.
LARGEST_SUM = 3e35


class Windows:
    """The windows of a pool along one axis of `size` elements: how many, and the pads before and behind."""

    def __init__(self, size: int, kernel: int, place: int, axes: int, attributes: dict[str, Any]) -> None:
        def of(name: str, otherwise: int, i: int = place) -> int:
            return int((attributes.get(name) or [otherwise] * 2 * axes)[i])

        self.size, self.kernel = size, kernel
        self.stride, self.dilation = of("strides", 1), of("dilations", 1)
        mode = _text(attributes.get("auto_pad", "NOTSET"))
        span = (kernel - 1) * self.dilation + 1
        if mode.startswith("SAME"):
            self.count = -(-size // self.stride)
            total = max(0, (self.count - 1) * self.stride + span - size)
            self.head = total // 2 if mode == "SAME_UPPER" else -(-total // 2)
            self.tail = total - self.head
            return
        self.head, self.tail = (0, 0) if mode == "VALID" else (of("pads", 0), of("pads", 0, place + axes))
        # ONNX's equations of the output's shape; no window begins behind the last pixel.
        steps = (size + self.head + self.tail - span) / self.stride
        self.count = int(np.ceil(steps) if attributes.get("ceil_mode") else np.floor(steps)) + 1
        if attributes.get("ceil_mode") and (self.count - 1) * self.stride >= size + self.head:
            self.count -= 1


def _text(given: str | bytes) -> str:
    return given if isinstance(given, str) else given.decode()


def windows_of(sizes: Sequence[int], attributes: dict[str, Any]) -> list[Windows]:
    """The windows along each axis of an image of `sizes`, by a pool's attributes."""
    kernel = attributes["kernel_shape"]
    return [Windows(size, kernel[i], i, len(kernel), attributes) for i, size in enumerate(sizes)]


def _slid(padded: Array, windows: list[Windows]) -> list[Array]:
    """For each element of a window, the pixels of all windows, from an image that begins with its pads."""
    parts = []
    for offsets in itertools.product(*(range(axis.kernel) for axis in windows)):
        places = [
            slice(o * axis.dilation, o * axis.dilation + (axis.count - 1) * axis.stride + 1, axis.stride)
            for o, axis in zip(offsets, windows, strict=True)
        ]
        parts.append(padded[(..., *places)])
    return parts


def _padded(array: Array, windows: list[Windows], value: float, pads: float) -> Array:
    """The image with `pads` around it, and `value` where a window of ceil_mode reaches beyond these."""
    ends = [(axis.head, axis.tail) for axis in windows]
    inner = np.pad(array, [(0, 0), (0, 0), *ends], constant_values=pads)
    beyond = [(0, axis.count * axis.stride + axis.kernel * axis.dilation) for axis in windows]
    return np.pad(inner, [(0, 0), (0, 0), *beyond], constant_values=value)


def pool(node: Node) -> list[Samples | None]:
    """AveragePool and MaxPool."""
    x, attributes = node.float(0), node.attributes
    if len(x.shape) != len(attributes["kernel_shape"]) + 2:
        raise Unknown
    windows = windows_of(x.shape[2:], attributes)
    if any(axis.count < 1 or max(axis.head, axis.tail) >= axis.kernel for axis in windows) or 0 in x.shape:
        raise Unknown  # ONNX Runtime cuts such windows
    if node.op_type == "MaxPool":
        if np.isnan(x.numbers).any():
            raise Unknown  # ONNX leaves open whether NaN is the largest
        return [x.map(lambda a: np.max(_slid(_padded(a, windows, -np.inf, -np.inf), windows), axis=0)), None]
    if attributes.get("ceil_mode") and node.opset < 19:
        raise Unknown  # ONNX Runtime's older kernels divide by whole windows
    includes = float(bool(attributes.get("count_include_pad")))
    ones = np.ones((1, 1, *x.shape[2:]))
    counts = np.sum(_slid(_padded(ones, windows, 0, includes), windows), axis=0)
    terms = int(np.prod([axis.kernel for axis in windows]))
    if not counts.all():
        raise Unknown
    made = x.shaken((terms + 2) * unit(x.dtype)).map(
        lambda a: np.sum(_slid(_padded(a, windows, 0, 0), windows), axis=0) / counts
    )
    return [_where_sums_fit(made.rounded(2.0))]


def _where_sums_fit(made: Samples) -> Samples:
    """The samples, unknown where kernels that add up in float32 may overflow."""
    sizes = np.abs(made.numbers)
    return made.unknown_where(((sizes > LARGEST_SUM) & np.isfinite(sizes)).any(axis=0))


def global_pool(node: Node) -> Samples:
    x = node.float(0)
    axes = tuple(range(2, len(x.shape)))
    if len(x.shape) < 3 or 0 in x.shape:
        raise Unknown
    if node.op_type == "GlobalMaxPool":
        if np.isnan(x.numbers).any():
            raise Unknown
        return x.map(lambda a: a.max(axis=axes, keepdims=True))
    terms = int(np.prod(x.shape[2:]))
    made = x.shaken((terms + 2) * unit(x.dtype)).map(lambda a: a.mean(axis=axes, keepdims=True))
    return _where_sums_fit(made.rounded(2.0))


def pad(node: Node) -> Samples:
    """A Pad as NumPy has it; parts that negative pads take away are cut first."""
    if node.opset < 11:
        raise Unknown
    x, pads = node.input(0), node.integers(1)
    axes = node.integers(3) if node.has(3) else list(range(len(x.shape)))
    if len(pads) != 2 * len(axes):
        raise Unknown
    ends = [[0, 0] for _ in x.shape]
    for i, axis in enumerate(axes):
        ends[axis] = [pads[i], pads[i + len(axes)]]
    mode = _text(node.attributes.get("mode", "constant"))
    more = [tuple(max(end, 0) for end in pair) for pair in ends]
    if mode != "constant" and (0 in x.shape or any(min(pair) < 0 for pair in ends)):
        raise Unknown
    longest = {"reflect": 1, "wrap": 0}
    if mode in longest and any(max(m) > size - longest[mode] for m, size in zip(more, x.shape, strict=True)):
        raise Unknown
    cut = tuple(slice(max(0, -h), size - max(0, -t)) for (h, t), size in zip(ends, x.shape, strict=True))
    value = node.optional(2)
    how = {} if mode != "constant" else {"constant_values": 0 if value is None else value.exact().reshape(-1)[0]}
    return x.map(lambda array: np.pad(array[cut], more, mode, **how))  # type: ignore[call-overload]


TABLE: Table = {
    ("", "AveragePool"): pool,
    ("", "MaxPool"): pool,
    ("", "GlobalAveragePool"): global_pool,
    ("", "GlobalMaxPool"): global_pool,
    ("", "Pad"): pad,
}
