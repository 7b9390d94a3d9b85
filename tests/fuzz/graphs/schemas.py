# SPDX-License-Identifier: Apache-2.0
"""Properties of operators from ONNX Runtime itself: versions, types that a schema allows, types that kernels take."""

from functools import cache
from typing import Any

import onnx
from onnx import TensorProto
from onnxruntime.capi import onnxruntime_pybind11_state as state

NEWEST_OPSET = 25  # the newest one for which ONNX Runtime 1.31 has kernels


@cache
def _schemas() -> dict[tuple[str, str], list[Any]]:
    found: dict[tuple[str, str], list[Any]] = {}
    for schema in state.get_all_operator_schema():
        found.setdefault((schema.domain, schema.name), []).append(schema)
    return found


@cache
def _kernels() -> dict[tuple[str, str], list[Any]]:
    found: dict[tuple[str, str], list[Any]] = {}
    for kernel in state.get_all_opkernel_def():
        found.setdefault((kernel.domain, kernel.op_name), []).append(kernel)
    return found


@cache
def first_opset(op_type: str, domain: str = "") -> int:
    """The first version of an operator for which ONNX Runtime has a kernel."""
    return int(min(kernel.version_range[0] for kernel in _kernels()[domain, op_type]))


@cache
def allowed(op_type: str, parameter: str, opset: int, domain: str = "") -> tuple[tuple[int, ...], tuple[int, ...]]:
    """ONNX element types of a type parameter ("T"): those that a kernel takes, and the schema's others."""
    version = opset if domain == "" else 1
    kernels: set[int] = set()
    for kernel in _kernels()[domain, op_type]:
        first, last = kernel.version_range
        if first <= version <= last:
            kernels.update(map(_element_type, kernel.type_constraints.get(parameter, ())))
    schema: set[int] = set()
    newest = max((s for s in _every(domain, op_type) if s[0] <= version), default=(0, {}), key=lambda s: s[0])
    schema.update(map(_element_type, newest[1].get(parameter, ())))
    # A kernel may have the parameter under another name, or not at all: then all types of the schema count.
    kernels = (kernels & schema) or schema
    return tuple(sorted(kernels - {0})), tuple(sorted(schema - kernels - {0}))


@cache
def _every(domain: str, op_type: str) -> list[tuple[int, dict[str, list[str]]]]:
    """All versions, with their types by parameter.

    ONNX Runtime lists only the newest version of ONNX's own operators; the package onnx has all.
    """
    found = [(s.since_version, s.type_constraints) for s in _schemas().get((domain, op_type), [])]
    if domain == "":
        found += [
            (s.since_version, s.type_constraints)
            for s in onnx.defs.get_all_schemas_with_history()
            if s.name == op_type and s.domain == ""
        ]
    return [(version, {t.type_param_str: list(t.allowed_type_strs) for t in types}) for version, types in found]


def _element_type(text: str) -> int:
    """The element type in "tensor(float)"; 0 for other types and for complex numbers, which no kernel takes."""
    if not text.startswith("tensor(") or "complex" in text:
        return 0
    return int(getattr(TensorProto, text[len("tensor(") : -1].upper(), 0))
