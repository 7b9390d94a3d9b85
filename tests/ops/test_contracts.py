# SPDX-License-Identifier: Apache-2.0
"""The contracts of operators against the operators' schemas: we know every part of a schema."""

import math
from collections import defaultdict
from typing import Any

import numpy as np
import pytest
from onnxruntime.capi.onnxruntime_pybind11_state import get_all_operator_schema

from flownpu import _native
from flownpu.ops.definitions import OPERATORS
from tests.ops.device import Node, run

CONTRACTS = _native.contracts()
NAMES = [f"{contract.domain}::{contract.op_type}" for contract in CONTRACTS]
OURS = [contract for contract in CONTRACTS if contract.domain == "ai.flownpu"]
OTHERS = [contract for contract in CONTRACTS if contract.domain != "ai.flownpu"]
# Before version 6 an attribute listed the inputs that an operator overwrites; no model uses it. FusedConv has
# parameters for functions that no contract takes.
HISTORICAL = {"consumed_inputs", "activation_params"}


def schemas() -> dict[tuple[str, str], list[Any]]:
    found: dict[tuple[str, str], list[Any]] = defaultdict(list)
    for schema in get_all_operator_schema():
        found[schema.domain, schema.name].append(schema)
    return found


SCHEMAS = schemas()


def versions(contract: Any) -> list[Any]:
    """The schemas that the contract takes."""
    return [
        schema
        for schema in SCHEMAS[contract.domain, contract.op_type]
        if contract.first_version <= schema.since_version <= contract.last_version
    ]


def test_operator_has_single_contract() -> None:
    assert len(set(NAMES)) == len(NAMES)


@pytest.mark.parametrize("contract", OTHERS, ids=lambda c: c.op_type)
def test_schema_ports_and_attributes_are_known_to_contract(contract: Any) -> None:
    """Inputs and outputs by position, attributes by name, for each version that is taken."""
    taken = versions(contract)
    assert {schema.since_version for schema in taken} >= {contract.last_version}
    attributes = {rule.name for rule in contract.attributes}
    # The branches of If: lists of constants, each as long as the outputs.
    lists = {port.name for port in contract.inputs if port.presence == _native.Presence.VARIADIC and port.constant}
    tensors = {port.name for port in contract.inputs if port.presence == _native.Presence.ATTRIBUTE} | lists
    inputs = [port for port in contract.inputs if port.name not in tensors]
    for schema in taken:
        assert set(schema.attributes) - attributes - tensors <= HISTORICAL, schema.since_version
        # A node with inputs or outputs beyond the contract's is refused.
        variadic = any("Variadic" in str(port.option) for port in schema.inputs)
        assert variadic or len(inputs) >= min(len(schema.inputs), 1), schema.since_version
        for given, expected in zip(inputs, schema.inputs, strict=False):
            optional = given.presence != _native.Presence.REQUIRED
            assert optional or "Optional" not in str(expected.option), (schema.since_version, given.name)


@pytest.mark.parametrize("contract", OTHERS, ids=lambda c: c.op_type)
def test_input_names_equal_last_schema(contract: Any) -> None:
    last = next(s for s in versions(contract) if s.since_version == contract.last_version)
    inputs = [port.name for port in contract.inputs if port.presence != _native.Presence.ATTRIBUTE]
    # If there is only one input, or all are alike, names may differ.
    if len(inputs) > 1 and len(last.inputs) > 1:
        assert inputs == [port.name for port in last.inputs][: len(inputs)]


@pytest.mark.parametrize("contract", OTHERS, ids=lambda c: c.op_type)
def test_contract_types_are_in_schema(contract: Any) -> None:
    """A contract takes what the last schema allows, or less."""
    last = next(s for s in versions(contract) if s.since_version == contract.last_version)
    allowed = {c.type_param_str: set(c.allowed_type_strs) for c in last.type_constraints}
    pairs = [*zip(contract.inputs, last.inputs, strict=False), *zip(contract.outputs, last.outputs, strict=False)]
    for port, expected in pairs:
        types = allowed.get(expected.typeStr, {expected.typeStr})
        assert {f"tensor({name})" for name in port.types} <= types, port.name


@pytest.mark.parametrize("contract", OURS, ids=lambda c: c.op_type)
def test_flownpu_contracts_equal_definitions(contract: Any) -> None:
    """The contract is the source of documentation, functions and definitions."""
    assert contract.op_type in OPERATORS
    parts = [*contract.inputs, *contract.outputs, *contract.attributes]
    assert not [part.name for part in parts if not part.meaning]
    assert not [rule.name for rule in contract.attributes if (rule.default is None) != rule.required]


@pytest.mark.parametrize(
    ("op_type", "inputs", "keywords", "reason"),
    [
        pytest.param("Add", 3, {}, r"expected 2 inputs at most, got input 2 \('input2'\)", id="input"),
        pytest.param("Add", 2, {"outputs": ("float", "float")}, r"expected 1 outputs at most", id="output"),
        pytest.param("Add", 2, {"broadcast": 1}, "attribute 'broadcast' is none that is known here", id="attribute"),
        pytest.param("Add", 2, {"version": 6}, "expected version 7 to 14 of the operator, got 6", id="old"),
        pytest.param("Add", 2, {"version": 99}, "expected version 7 to 14 of the operator, got 99", id="new"),
        pytest.param("Add", 1, {}, r"input 1 \(B\): expected float or .*, got none", id="none"),
        pytest.param("Add", 2, {"outputs": ("float16",)}, r"output 0 \(C\): expected .*, got float16", id="type"),
        pytest.param("Gelu", 1, {"approximate": "erf"}, r"expected one of none\|tanh, got 'erf'", id="text"),
        pytest.param("Gelu", 1, {"approximate": 1}, "expected a text, got an integer", id="kind"),
        pytest.param("Softmax", 1, {"axis": 9}, "attribute 'axis': expected -8 to 8, got 9", id="range"),
        pytest.param("Gemm", 2, {"alpha": math.nan}, "attribute 'alpha': expected -inf to inf, got nan", id="number"),
        pytest.param("Transpose", 1, {"perm": [0, 8]}, "attribute 'perm': expected 0 to 7, got 8", id="list"),
    ],
)
def test_call_outside_contract_is_refused(op_type: str, inputs: int, keywords: dict[str, Any], reason: str) -> None:
    x = np.ones((2, 2), np.float32)
    with pytest.raises(ValueError, match=rf"\[{op_type} 'node'\] .*{reason}"):
        run(op_type, [x] * inputs, domain="", **keywords)


def test_shape_letter_is_same_length_in_all_inputs() -> None:
    """In a known shape, and in a shape at run time."""
    inputs = [np.ones((1, 1, 4), np.float32), np.zeros(1, np.int64), np.ones((4, 2), np.float32)]
    wrong = np.ones((5, 2), np.float32)
    with pytest.raises(ValueError, match=r"input 3 \(sin_cache\): expected shape \[4,2\], got \[5,2\]"):
        run("RotaryEmbedding", [*inputs, wrong], domain="com.microsoft")
    node = Node("RotaryEmbedding", [*inputs, inputs[2]], domain="com.microsoft")
    with pytest.raises(ValueError, match=r"input 3 \(sin_cache\) of shape \[4,2\], got \[5,2\]"):
        node(*inputs, wrong)
