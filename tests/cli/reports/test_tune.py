# SPDX-License-Identifier: Apache-2.0
"""`flownpu tune` prints the model's numbers, fastest first."""

import json

import pytest

from flownpu.aie.check import check
from flownpu.aie.cost.gemm_model import Tiling, predict_gemm
from flownpu.aie.cost.gemm_tuner import rank
from flownpu.npu.models import MODELS, projections


def best_gemm(*kind_and_sizes):
    """The fastest design that passes the checker."""
    for design, _ in rank(*kind_and_sizes):
        call = design.program(design.height, design.k_mt, design.width)
        if not check(call.resolve_program("gemm")):
            return design
    raise AssertionError("no design passes the checker")


SIZE = ("-m", 500, "-k", 1000, "-n", 1100)


def document(flownpu, *arguments):
    done = flownpu("tune", "gemm", *SIZE, *arguments, "--json")
    assert done.code == 0, done.err
    return json.loads(done.out)


@pytest.mark.parametrize(
    ("precision", "options"),
    [
        ("bf16", ()),
        ("bfp16", ("--epilogue", "geglu")),
        ("bf16-bf16", ("--target", "npu1")),
    ],
)
def test_tiles_equal_cost_model(flownpu, precision, options):
    """Every row has the cost model's prediction for this size and these options."""
    found = document(flownpu, "--precision", precision, *options)
    assert found["predicted"] is True
    assert [found["m"], found["k"], found["n"]] == [500, 1000, 1100]
    assert 1 < len(found["tiles"]) <= 5 <= found["tried"]
    seconds = [one["prediction"]["seconds"] for one in found["tiles"]]
    assert seconds == sorted(seconds)
    for one in found["tiles"]:
        tiling = Tiling(**one["tiling"])
        columns = -(-1100 // 32) * 32 if precision in {"bf16", "bfp16"} else 1100
        of = predict_gemm(found["target"], precision, 500, 1000, columns, tiling)
        assert of.seconds == one["prediction"]["seconds"]
        assert tiling.gates == (2 if "geglu" in options else 1)


def test_first_row_is_choice_of_tuner(flownpu):
    tiling = document(flownpu, "--precision", "bfp16", "--top", 1)["tiles"][0]["tiling"]
    best = best_gemm("npu2", "bfp16", "none", 500, 1000, 1100)
    assert [tiling[name] for name in ("m", "k", "n", "k_mt", "e_y", "e_x")] == [
        best.m, best.k, best.n, best.k_mt, best.e_y, best.e_x,
    ]  # fmt: skip


def test_tuning_table_has_expected_rows(flownpu):
    done = flownpu("tune", "gemm", *SIZE, "--top", 3)
    assert done.code == 0
    head, *rows, end = done.out.splitlines()
    assert head.split()[:5] == ["m", "x", "k", "x", "n"]
    assert len(rows) == 3
    assert "predicted, not measured" in end


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--precision", "bfp16", "--target", "npu1"), "weights in bf16 or, on npu2, bfp16, got 'bfp16' on npu1"),
        (("--precision", "bfp16-bf16", "--target", "npu1"), "got 'bfp16-bf16'"),
        (("-n", 32), "expected M, K and N that tiles of bf16 on npu2 take, got 500, 1000, 32"),
        (("-m", 0), "-m"),
    ],
)
def test_unfit_arguments_are_refused(flownpu, options, message):
    done = flownpu("tune", "gemm", *SIZE, *options)
    assert done.code == 2
    assert message in done.err


def test_tuned_tiles_serve_every_projection_of_model():
    """If this fails, a projection has no design that passes the checker, or one that pads it in another way."""
    for n, k, epilogue in projections(MODELS["gemma3-1b"]):
        design = best_gemm("npu2", "bfp16", epilogue, 512, k, n)
        rows, columns = design.padded(512, k)
        assert rows == 512
        assert columns == -(-k // 256) * 256  # as the dequantisation engine pads
