# SPDX-License-Identifier: Apache-2.0
"""What FlowNPU's operators accept, read from their contracts in C++ (ops/nodes/contract.h)."""

from __future__ import annotations

import functools

from flownpu import _native

__all__ = ["contract_of", "input_position"]

_DOMAIN = "ai.flownpu"


@functools.cache
def contract_of(op_type: str) -> _native.Contract:
    """The contract of an operator of the domain ai.flownpu, such as "Q4NXMatMul"; StopIteration if there is none."""
    return next(c for c in _native.contracts() if c.domain == _DOMAIN and c.op_type == op_type)


def input_position(op_type: str, name: str) -> int:
    """The position of the input `name` among the operator's inputs; ValueError if it has no such input."""
    return [port.name for port in contract_of(op_type).inputs].index(name)
