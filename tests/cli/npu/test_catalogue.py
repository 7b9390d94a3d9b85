# SPDX-License-Identifier: Apache-2.0
"""The catalogue of `flownpu build`: every call is valid, arrays are shared, and mlir-opt parses their MLIR."""

import itertools
import re
import subprocess

import pytest

from flownpu.aie.check import check
from flownpu.aie.mlir.module import to_mlir
from flownpu.model.shapes import SHAPES
from flownpu.npu.catalogue import OPERATORS, catalogue
from flownpu.npu.models import MODELS, projections
from scripts import tools
from tests.aie.mlir.dialect import generic_form


def plan_of(call):
    return call.program(0).resolve_program("main")


def test_catalogue_has_convertible_models_and_encoder():
    assert MODELS.keys() == {*(name for name, shape in SHAPES.items() if "num_experts" not in shape), "siglip"}
    assert projections(MODELS["gemma3-1b"]) == [  # (4 + 2) x 256, 1152, 4 x 256, 6912
        (1536, 1152, "none"), (1152, 1024, "none"), (6912, 1152, "geglu"), (1152, 6912, "none"),
    ]  # fmt: skip


@pytest.fixture(scope="module")
def calls_of_xdna2():
    """All calls of the catalogue for the second generation, by operator, each with its plan."""
    return {name: [(call, plan_of(call)) for call in catalogue("npu2", [name])] for name in OPERATORS}


@pytest.mark.parametrize("operator", OPERATORS)
def test_calls_on_xdna2_are_valid_and_share_arrays(calls_of_xdna2, operator):
    arrays = {}
    calls = calls_of_xdna2[operator]
    assert calls
    for call, plan in calls:
        assert check(plan) == [], call
        assert arrays.setdefault(call.array, plan.array) == plan.array, call
    assert len({(call.array, call.name) for call, _ in calls}) == len(calls)


@pytest.fixture(scope="module")
def calls_of_xdna():
    """Calls of two models for the first generation, each with its plan."""
    return [(call, plan_of(call)) for call in catalogue("npu1", models=["gemma3-4b", "llama3.2-1b"])]


def test_calls_on_xdna_are_valid(calls_of_xdna):
    for call, plan in calls_of_xdna:
        assert check(plan) == [], call


@pytest.mark.skipif(tools.find("mlir-opt") is None, reason=tools.reason("mlir-opt"))
def test_mlir_opt_parses_arrays(calls_of_xdna2, calls_of_xdna):
    """One array of each kind: the others differ in numbers."""
    calls = [*calls_of_xdna, *itertools.chain(*calls_of_xdna2.values())]
    kinds = {(plan.array.target, re.sub(r"\d", "", call.array)): plan for call, plan in calls}
    texts = [generic_form(to_mlir(plan)) for plan in kinds.values()]
    command = [tools.find("mlir-opt"), "--allow-unregistered-dialect", "--split-input-file", "-o", "/dev/null"]
    done = subprocess.run(command, input="\n// -----\n".join(texts), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
