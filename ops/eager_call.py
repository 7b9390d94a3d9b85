# SPDX-License-Identifier: Apache-2.0
"""How `eager` calls an operator: arrays of any library become memory that the C++ reads, results numpy's.

What an operator takes, its inputs' order and types and its attributes' kinds, is asked of the C++, which checks the
rest: shapes, lengths and ranges.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import ml_dtypes
import numpy as np

from flownpu import _native
from flownpu.ops.contracts import contract_of
from flownpu.ops.opencl_loader import use_installed_packages

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

DOMAIN = "ai.flownpu"
# The types' names in ONNX, by which the C++ calls them.
TYPE_NAMES = {
    np.dtype(np.float32): "float",
    np.dtype(np.float16): "float16",
    np.dtype(ml_dtypes.bfloat16): "bfloat16",
    np.dtype(np.int64): "int64",
    np.dtype(np.int32): "int32",
    np.dtype(np.int8): "int8",
    np.dtype(np.uint8): "uint8",
    np.dtype(np.bool_): "bool",
}
DTYPES = {name: dtype for dtype, name in TYPE_NAMES.items()}
# Numbers of up to 8 bytes are read where they lie, which C++ leaves undefined at odd addresses.
_ALIGNMENT = 8
# The most axes of a shape in the C++ (Shape::kMaxRank, ops/nodes/tensor.h).
_MOST_AXES = 8
# What the arguments are called whose names in the operator are equations'.
_ARGUMENTS = {"X": "x", "W": "weight"}

# Those that the C++ makes; `emulated` is Python's.
_DEVICES = ("cpu", "gpu")
_devices: dict[tuple[str, tuple[tuple[str, str], ...]], _native.Device] = {}
_devices_lock = threading.Lock()


class SupportsDLPack(Protocol):
    """An array that other libraries may read in place, such as torch's tensors."""

    def __dlpack__(self, *arguments: Any, **keywords: Any) -> Any:
        """The array's memory, in a capsule."""


Array: TypeAlias = "NDArray[Any] | SupportsDLPack"


def compute(
    function: str,
    op_type: str,
    inputs: Mapping[str, object],
    attributes: Mapping[str, object],
    outputs: Sequence[str],
    device: str,
    options: Mapping[str, str | int] | None,
) -> list[NDArray[Any]]:
    """Runs an operator once.

    Args:
        function: What errors call the operator.
        op_type: The operator.
        inputs: Arrays by the operator's names of its inputs; None, or none, for an absent one.
        attributes: By the operator's names; None, or none, for the default.
        outputs: The types of the outputs, as the C++ calls them.
        device: Where.
        options: Of the device.

    Raises:
        TypeError: An argument is no array, or of a type that the operator does not take.
        ValueError: Anything else that does not fit.
    """
    contract = contract_of(op_type)
    ports = contract.inputs
    arrays = [as_array(function, op_type, port.name, inputs.get(port.name)) for port in ports]
    given = [as_pair(array) for array in arrays]
    node = _native.PreparedNode(
        open_device(function, device, options),
        function,
        DOMAIN,
        op_type,
        _attributes(function, contract, attributes),
        given,
        [argument(port.name) for port in ports],
        [i for i, port in enumerate(ports) if port.constant],
        list(outputs),
        contract.last_version,
    )
    # Zeros: an operator may leave parts of its outputs unspecified, and nobody shall read there what was in memory.
    results = [np.zeros(shape, DTYPES[name]) for shape, name in zip(node.infer(given), outputs, strict=True)]
    node.run(given, [as_pair(result) for result in results])
    return results


def open_device(function: str, name: str, options: Mapping[str, str | int] | None) -> _native.Device:
    """The device of this name and these options, made once.

    Raises:
        TypeError: A name or an option is no text.
        ValueError: There is no such device or option.
    """
    if not isinstance(name, str):
        raise TypeError(f"[{function}] expected device to be a str, got {type(name).__name__}")
    if name not in _DEVICES:
        raise ValueError(
            f"[{function}] expected device = 'cpu', 'gpu' or 'emulate', got {name!r}: on others whole decoders and "
            "encoders run, through ONNX Runtime"
        )
    if not isinstance(options, Mapping | None):
        raise TypeError(f"[{function}] expected options to be a dict, got {type(options).__name__}")
    texts = {}
    for key, value in (options or {}).items():
        if not isinstance(key, str) or not isinstance(value, (str, int)):
            raise TypeError(f"[{function}] expected options to be of str, got {key!r}: {value!r}")
        texts[key] = str(value)
    identity = (name, tuple(sorted(texts.items())))
    with _devices_lock:
        if identity not in _devices:
            if name == "gpu":
                use_installed_packages()
            try:
                _devices[identity] = _native.make_device(name, texts)
            except ValueError as error:
                raise ValueError(f"[{function}] {error}") from None
        return _devices[identity]


def argument(name: str) -> str:
    """What the functions call an input of the operator."""
    return _ARGUMENTS.get(name, name)


def as_array(function: str, op_type: str, name: str, value: object) -> NDArray[Any] | None:
    """An input as numpy's array, dense and aligned: the caller's memory where it is both, else a copy.

    Raises:
        TypeError: It is no array, or of a type that the operator does not take.
        ValueError: It has too many axes.
    """
    if value is None:
        return None
    port = next(port for port in contract_of(op_type).inputs if port.name == name)
    name = argument(name)
    wanted = " or ".join(DTYPES[one].name for one in port.types)
    if isinstance(value, (np.ndarray, np.generic)):
        array = np.asarray(value)
    elif hasattr(value, "__dlpack__"):
        array = _borrow(function, name, wanted, value)
    else:
        raise TypeError(
            f"[{function}] expected {name} to be an array of {wanted} (numpy's, or another library's with DLPack), "
            f"got {type(value).__name__}"
        )
    if TYPE_NAMES.get(array.dtype) not in port.types:
        raise TypeError(f"[{function}] expected {name} of {wanted}, got {array.dtype}: convert it")
    if array.ndim > _MOST_AXES:
        raise ValueError(f"[{function}] expected {name} of at most {_MOST_AXES} axes, got {array.ndim}")
    array = np.asarray(array, order="C")
    return array if array.ctypes.data % _ALIGNMENT == 0 else array.copy()


def _borrow(function: str, name: str, wanted: str, value: object) -> NDArray[Any]:
    """A view of another library's array."""
    try:
        kind, bits = _native.borrow(value)
    except ValueError as error:
        raise TypeError(
            f"[{function}] expected {name} to be an array of {wanted} in the CPU's memory, got "
            f"{type(value).__name__} of {getattr(value, 'dtype', 'no type')}: {error}"
        ) from None
    return np.asarray(bits).view(DTYPES[kind])


def as_pair(array: NDArray[Any] | None) -> tuple[str, NDArray[Any]] | None:
    """What the C++ takes for an array: numpy's exchange protocol knows no bfloat16, whose bits go as integers."""
    if array is None:
        return None
    name = TYPE_NAMES[array.dtype]
    return name, array.view(np.uint16) if name == "bfloat16" else array


def _attributes(
    function: str, contract: _native.Contract, attributes: Mapping[str, object]
) -> dict[str, int | float | str]:
    """The attributes that are given, as the kinds that they are."""
    rules = {rule.name: rule for rule in contract.attributes}
    return {name: _attribute(function, rules[name], value) for name, value in attributes.items() if value is not None}


def _attribute(function: str, rule: _native.AttributeRule, value: object) -> int | float | str:
    if rule.kind == _native.Kind.TEXT:
        if not isinstance(value, str):
            raise TypeError(f"[{function}] expected {rule.name} to be a str, got {type(value).__name__}")
        return value
    if rule.kind == _native.Kind.INTEGER:
        return as_integer(function, rule.name, value, 64)
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        raise TypeError(f"[{function}] expected {rule.name} to be a number, got {value!r}") from None
    if not abs(number) <= float(np.finfo(np.float32).max):
        raise ValueError(f"[{function}] expected {rule.name} to be a number of float32's range, got {number}")
    return number


def as_integer(function: str, name: str, value: object, bits: int) -> int:
    """A whole number that a signed integer of so many bits holds.

    Raises:
        TypeError: It is no integer.
        ValueError: It is too large.
    """
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"[{function}] expected {name} to be an integer, got {type(value).__name__}") from None
    if not -(1 << (bits - 1)) <= number < 1 << (bits - 1):
        raise ValueError(f"[{function}] expected {name} to be an integer of {bits} bits, got {number}")
    return number
