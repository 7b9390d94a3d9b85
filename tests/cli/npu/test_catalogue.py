# SPDX-License-Identifier: Apache-2.0
"""The catalogue of `flownpu build`: every call is valid, arrays are shared, and mlir-opt parses their MLIR."""

import subprocess

import pytest

from flownpu.aie.check import check
from flownpu.aie.mlir.module import to_mlir
from flownpu.aie.plan.limits import LIMITS
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


@pytest.mark.parametrize("operator", OPERATORS)
def test_calls_on_xdna2_are_valid_and_share_arrays(operator):
    arrays = {}
    calls = catalogue("npu2", [operator])
    assert calls
    for call in calls:
        plan = plan_of(call)
        assert check(plan) == [], call
        assert arrays.setdefault(call.array, plan.array) == plan.array, call
    assert len({(call.array, call.name) for call in calls}) == len(calls)


def test_calls_on_xdna_are_valid():
    for call in catalogue("npu1", models=["gemma3-4b", "llama3.2-1b"]):
        assert check(plan_of(call)) == [], call


@pytest.mark.skipif(tools.find("mlir-opt") is None, reason=tools.reason("mlir-opt"))
@pytest.mark.parametrize("target", LIMITS)
def test_mlir_opt_parses_every_array(target):
    """One call of each; other calls differ in the numbers of their sequence."""
    texts = {}
    for call in catalogue(target):
        if call.array not in texts:
            try:
                texts[call.array] = generic_form(to_mlir(plan_of(call)))
            except ValueError:
                assert target == "npu1"
    text = "\n// -----\n".join(texts.values())
    command = [tools.find("mlir-opt"), "--allow-unregistered-dialect", "--split-input-file", "-o", "/dev/null"]
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
