# SPDX-License-Identifier: Apache-2.0
"""How `eager` calls an operator: passes arrays of any library to the C++, and allocates the results with NumPy.

The order and types of an operator's inputs and the kinds of its attributes are read from its contract, and checked
here; shapes, lengths and ranges are checked by the C++.
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
from flownpu.system.opencl_loader import use_installed_packages

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

DOMAIN = "ai.flownpu"
# The names that ONNX, and so the C++, has for NumPy's types.
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
# The C++ reads elements of up to 8 bytes in place, which is undefined behaviour at unaligned addresses.
_ALIGNMENT = 8
# The most axes that a shape has in the C++ (Shape::kMaxRank, ops/nodes/tensor.h).
_MOST_AXES = 8
# The functions' names for inputs and sizes whose operator name is a letter of an equation.
ARGUMENTS = {"X": "x", "W": "weight", "M": "rows", "K": "columns"}

_DEVICES = ("cpu", "gpu")
_devices: dict[tuple[str, tuple[tuple[str, str], ...]], _native.Device] = {}
_devices_lock = threading.Lock()


class SupportsDLPack(Protocol):
    """An array whose memory other libraries can read in place, such as a torch tensor."""

    def __dlpack__(self, *arguments: Any, **keywords: Any) -> Any:
        """Returns a capsule that holds the array's memory."""


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
        function: The name that error messages begin with.
        op_type: The operator's name, such as "Q4NXMatMul".
        inputs: Arrays by the operator's names for its inputs; an absent one is None or left out.
        attributes: Values by the operator's names; None, or left out, for the default.
        outputs: The types of the outputs, by ONNX's names.
        device: "cpu" or "gpu".
        options: The device's options, by name.

    Returns:
        The outputs, as new arrays.

    Raises:
        TypeError: An argument is no array, or of a type that the operator does not take.
        ValueError: Anything else does not fit.
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
    # Outputs begin as zeros: an operator may leave parts of them unspecified, and these must not show earlier contents
    # of the memory.
    results = [np.zeros(shape, DTYPES[name]) for shape, name in zip(node.infer(given), outputs, strict=True)]
    node.run(given, [as_pair(result) for result in results])
    return results


def open_device(function: str, name: str, options: Mapping[str, str | int] | None) -> _native.Device:
    """The device with this name and these options. It is made once and kept.

    Raises:
        TypeError: The name is no str, or an option neither str nor int.
        ValueError: There is no such device or option.
    """
    if not isinstance(name, str):
        raise TypeError(f"[{function}] expected device to be a str, got {type(name).__name__}")
    if name not in _DEVICES:
        raise ValueError(
            f"[{function}] expected device = 'cpu' or 'gpu', got {name!r}: on others whole decoders and "
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
    """The functions' name for an input that the operator calls `name`."""
    return ARGUMENTS.get(name, name)


def as_array(function: str, op_type: str, name: str, value: object) -> NDArray[Any] | None:
    """An input as a NumPy array that is dense and aligned: the caller's memory where that is both, else a copy.

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
    """An array as the C++ takes it: type name and memory. NumPy cannot export bfloat16, which goes as its bits."""
    if array is None:
        return None
    name = TYPE_NAMES[array.dtype]
    return name, array.view(np.uint16) if name == "bfloat16" else array


def _attributes(
    function: str, contract: _native.Contract, attributes: Mapping[str, object]
) -> dict[str, int | float | str]:
    """The attributes that are not None, converted to the kinds that the contract names."""
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
    """Checks that `value` is an integer that fits a signed integer of `bits` bits.

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
