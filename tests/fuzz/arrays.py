# SPDX-License-Identifier: Apache-2.0
"""Arrays of random numbers, ordinary and extreme, of every element type, stored as a kind and a seed."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import onnx
from onnx import TensorProto, helper

Array = np.ndarray[Any, np.dtype[Any]]

FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE)
SIGNED = (TensorProto.INT64, TensorProto.INT32, TensorProto.INT8, TensorProto.INT16)
UNSIGNED = (TensorProto.UINT8, TensorProto.UINT16, TensorProto.UINT32, TensorProto.UINT64)
INTEGERS = SIGNED + UNSIGNED
# Types that a run can be fed with; arrays of others are constants.
FED = (*FLOATS, *INTEGERS, TensorProto.BOOL)

ORDINARY = ("small integers", "normal", "zeros")
WILD = (*ORDINARY, "wide", "special", "extreme", "ones")


def numpy_type(kind: int) -> np.dtype[Any]:
    """numpy's type of an ONNX element type."""
    return np.dtype(ml_dtypes.bfloat16) if kind == TensorProto.BFLOAT16 else helper.tensor_dtype_to_np_dtype(kind)


def is_float(dtype: np.dtype[Any]) -> bool:
    """Whether a type is one of floats, including bfloat16 and the like."""
    return dtype.kind == "f" or (dtype.kind == "V" and dtype.names is None and "float" in dtype.name)


def limits(dtype: np.dtype[Any]) -> Any:
    """The limits of a type: `min` and `max`, and for floats `eps` and `smallest_subnormal`."""
    of: Any = ml_dtypes.finfo if is_float(dtype) else ml_dtypes.iinfo
    return of(dtype)


@dataclass(frozen=True)
class Source:
    """The source of an array: `kind` and `seed` of its numbers, or the numbers themselves (`given`)."""

    type: int
    shape: tuple[int, ...]
    kind: str = "zeros"
    seed: int = 0
    given: Any = None

    def array(self) -> Array:
        """The numbers."""
        dtype = numpy_type(self.type)
        if self.given is not None:
            return np.asarray(self.given, dtype).reshape(self.shape)
        rng = np.random.default_rng(self.seed)
        if self.type == TensorProto.STRING:
            return rng.choice(np.array(["", "a", "bc"], object), self.shape)
        if dtype == np.bool_:
            return np.asarray(rng.integers(0, 2, self.shape) > 0)
        with np.errstate(all="ignore"):
            if is_float(dtype):
                return np.asarray(_FLOATS[self.kind](rng, self.shape, dtype)).astype(dtype)
            return _integers(self.kind, rng, self.shape, dtype)


def _integers(kind: str, rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    lowest, highest = int(limits(dtype).min), int(limits(dtype).max)
    if kind in ("zeros", "ones"):
        return np.full(shape, int(kind == "ones"), dtype)
    if kind in ("wide", "special") and dtype.itemsize > 0 and highest > 100:
        # Random numbers, shifted right by a random number of bits: all sizes occur.
        numbers = rng.integers(lowest, highest, shape, np.int64 if lowest else np.uint64, endpoint=True)
        return np.asarray(numbers >> rng.integers(0, 8 * dtype.itemsize, shape).astype(numbers.dtype)).astype(dtype)
    if kind == "extreme":
        choices = [lowest, highest, 0, 1, max(lowest, -1), highest // 2 + 1]
        return np.array(choices, np.int64 if lowest else np.uint64).astype(dtype)[rng.integers(0, 6, shape)]
    return np.asarray(rng.integers(max(-3, lowest), min(4, highest), shape)).astype(dtype)


def _special(rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    info = limits(dtype)
    tiny = float(info.smallest_subnormal)
    rare = [np.nan, np.inf, -np.inf, -0.0, tiny, -float(info.tiny), float(info.max), float(info.min), 0.0, 88.8, -104.0]
    numbers = rng.standard_normal(shape)
    # Rare numbers are 3 % of a thousand numbers, and 20 % of ten.
    share = min(0.2, 8 / max(1, numbers.size) + 0.02)
    return np.where(rng.random(shape) < share, np.array(rare)[rng.integers(0, len(rare), shape)], numbers)


_FLOATS: dict[str, Callable[[np.random.Generator, tuple[int, ...], np.dtype[Any]], Array]] = {
    "zeros": lambda _, shape, __: np.zeros(shape),
    "ones": lambda _, shape, __: np.ones(shape),
    "small integers": lambda rng, shape, _: np.asarray(rng.integers(-3, 4, shape), np.float64),
    "normal": lambda rng, shape, _: np.asarray(rng.standard_normal(shape)),
    "wide": lambda rng, shape, _: rng.standard_normal(shape) * 10.0 ** rng.uniform(-12, 12, shape),
    "special": _special,
    "extreme": lambda rng, shape, dtype: (
        np.array([1.0, -1.0, 0.5])[rng.integers(0, 3, shape)] * float(limits(dtype).max)
    ),
}


def tensor(array: Array, kind: int, name: str) -> onnx.TensorProto:
    """An initializer; handles types of 4 and 2 bits, which are packed, and strings."""
    if kind == TensorProto.STRING:
        texts: Any = [str(text).encode() for text in array.reshape(-1)]
        return helper.make_tensor(name, kind, array.shape, texts)
    if helper.tensor_dtype_to_np_dtype(kind).itemsize * 8 > _BITS.get(kind, 8):
        return onnx.numpy_helper.from_array(array, name)
    made = onnx.TensorProto(name=name, data_type=kind, dims=array.shape)
    made.raw_data = np.ascontiguousarray(array).tobytes()
    return made


_BITS: dict[int, int] = {
    TensorProto.INT4: 4,
    TensorProto.UINT4: 4,
    TensorProto.FLOAT4E2M1: 4,
    TensorProto.INT2: 2,
    TensorProto.UINT2: 2,
}
