# SPDX-License-Identifier: Apache-2.0
"""The schemas of FlowNPU's operators, read from the C++ (ops/nodes/contract.h says who else reads them).

The ONNX functions of `definitions`, the functions of `eager` with their signatures and documentation, and the tables of
docs/operators.md are made from them.
"""

import functools
import inspect
import textwrap
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, TypeVar

from flownpu import _native

_DOMAIN = "ai.flownpu"
_WIDTH = 116  # of a function's documentation, which help() indents by 4
_Function = TypeVar("_Function", bound="Callable[..., Any]")


@functools.cache
def contract_of(op_type: str) -> _native.Contract:
    """The contract of an operator of the domain ai.flownpu, such as "Q4NXMatMul"; StopIteration if there is none."""
    return next(c for c in _native.contracts() if c.domain == _DOMAIN and c.op_type == op_type)


@functools.cache
def input_names(op_type: str) -> tuple[str, ...]:
    """The names of an operator's inputs, in their order."""
    return tuple(port.name for port in contract_of(op_type).inputs)


def input_position(op_type: str, name: str) -> int:
    """The position of the input `name` among the operator's inputs; ValueError if it has no such input."""
    return input_names(op_type).index(name)


def defaults(op_type: str) -> dict[str, Any]:
    """The operator's optional attributes and their defaults."""
    found = {rule.name: rule.default for rule in contract_of(op_type).attributes if not rule.required}
    # The double 1e-6: seven digits identify a float32.
    return {name: float(f"{value:.7g}") if isinstance(value, float) else value for name, value in found.items()}


def arguments(op_type: str, inputs: Sequence[Any], named: Mapping[str, Any]) -> SimpleNamespace:
    """The arguments of a call with inputs by position, and inputs and attributes by name.

    Returns:
        All inputs and optional attributes, by name; absent inputs are None.

    Raises:
        TypeError: The operator has no such input or attribute.
    """
    names = input_names(op_type)
    given = dict(zip(names[: len(inputs)], inputs, strict=True)) | dict(named)
    known = {*names, *(rule.name for rule in contract_of(op_type).attributes)}
    if unknown := given.keys() - known:
        raise TypeError(f"[{op_type}] expected arguments among {', '.join(sorted(known))}, got {min(unknown)}")
    return SimpleNamespace(**dict.fromkeys(names) | defaults(op_type) | given)


def _types(port: _native.Port) -> str:
    """The types of an input or output as NumPy calls them: "float32, float16 or bfloat16"."""
    names = ["float32" if name == "float" else name for name in port.types]
    return " or ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def documented(
    op_type: str, others: Mapping[str, str], renamed: Mapping[str, str] | None = None
) -> Callable[[_Function], _Function]:
    """Gives a function the operator's signature, in place of `**keywords`, and the documentation of its arguments.

    Args:
        op_type: The operator.
        others: Documentation of further arguments, and of those of which the schema does not say all.
        renamed: The function's names of inputs and attributes that it calls otherwise.
    """
    contract = contract_of(op_type)
    names = renamed or {}
    texts = {names.get(port.name, port.name): f"{_types(port)} {port.meaning}" for port in contract.inputs}
    texts |= {names.get(rule.name, rule.name): _meaning(rule) for rule in contract.attributes} | dict(others)

    def apply(function: _Function) -> _Function:
        signature = inspect.signature(function)
        function.__signature__ = _expanded(signature, texts, defaults(op_type))  # type: ignore[attr-defined]
        lines = [
            textwrap.fill(f"{name}: {texts[name]}.", _WIDTH, initial_indent=" " * 8, subsequent_indent=" " * 12)
            for name in function.__signature__.parameters  # type: ignore[attr-defined]
        ]
        text = "\n".join(["Args:", *lines])
        function.__doc__ = (function.__doc__ or "").replace("    Returns:", f"    {text}\n\n    Returns:", 1)
        return function

    return apply


def _meaning(rule: _native.AttributeRule) -> str:
    values = " or ".join(repr(text) for text in rule.texts.split("|")) if rule.texts else ""
    fallback = "" if rule.required else f"default {rule.default!r}" if values else f"default {rule.default:g}"
    return "; ".join(filter(None, [values, rule.meaning, fallback]))


def _expanded(
    signature: inspect.Signature, texts: Mapping[str, str], fallbacks: Mapping[str, Any]
) -> inspect.Signature:
    """The signature with all of the operator's inputs and attributes in place of `**keywords`."""
    found = list(signature.parameters.values())
    if found[-1].kind != inspect.Parameter.VAR_KEYWORD:
        return signature
    more = [name for name in texts if name not in signature.parameters]
    kind = inspect.Parameter.KEYWORD_ONLY
    return signature.replace(
        parameters=[*found[:-1], *(inspect.Parameter(name, kind, default=fallbacks.get(name)) for name in more)]
    )
