# SPDX-License-Identifier: Apache-2.0
"""ONNX's backend suite, which the package onnx brings: what ORT's CPU provider passes, sessions with FlowNPU pass.

`pytest -rP tests/ops/test_onnx_backend.py` prints how many cases there are. Cases of trained models, which the suite
downloads or fills with random weights, are not among them.
"""

from __future__ import annotations

import json
import warnings
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import numpy_helper

if TYPE_CHECKING:
    from collections.abc import Sequence

# Sanitizers would only slow the sessions down; the kernels that are released are in the other build.
pytestmark = pytest.mark.slow

KINDS = ("node", "simple", "pytorch-converted", "pytorch-operator")
# ONNX Runtime alone removes pairs of casts, so that float16 nodes in a row compute in float32. Between nodes of two
# providers each result is rounded to float16 as the specification says; attention's function has 8 such nodes in a row,
# each of which adds at most half a unit in the last place, 2^-11.
FLOAT16 = 8 * 2.0**-11


class Case(NamedTuple):
    name: str
    model: bytes
    # Inputs and outputs of each run.
    runs: Sequence[tuple[Sequence[Any], Sequence[Any]]]
    rtol: float
    atol: float


def _stored(folder: Path, part: str) -> list[onnx.TensorProto]:
    files = sorted(folder.glob(f"{part}_*.pb"), key=lambda file: int(file.stem.rpartition("_")[2]))
    return [onnx.TensorProto.FromString(file.read_bytes()) for file in files]


@cache
def cases() -> list[Case]:
    """All cases that ORT's CPU provider passes."""
    from onnx.backend.test.loader import load_model_tests

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of overflows, which cases are about
        found = [case for kind in KINDS for case in load_model_tests(kind=kind)]
    passed = []
    for case in found:
        if case.model is not None:
            model, runs = case.model.SerializeToString(), case.data_sets
        else:
            folder = Path(case.model_dir)
            model = (folder / "model.onnx").read_bytes()
            runs = [(_stored(data, "input"), _stored(data, "output")) for data in folder.glob("test_data_set_*")]
        candidate = Case(case.name, model, runs, case.rtol, case.atol)
        if not failure(candidate, None):
            passed.append(candidate)
    print(f"{len(found)} cases, of which ONNX Runtime's CPU provider passes {len(passed)}")
    return passed


def failure(case: Case, provider: tuple[Any, dict[str, str]] | None) -> str:
    """Why a session, with FlowNPU's device and options or the CPU provider alone, does not pass; "" if it does."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    try:
        if provider is None:
            session = onnxruntime.InferenceSession(case.model, options, providers=["CPUExecutionProvider"])
        else:
            options.add_provider_for_devices([provider[0]], provider[1])
            session = onnxruntime.InferenceSession(case.model, options)
            session.disable_fallback()
        for inputs, expected in case.runs:
            names = [given.name for given in session.get_inputs()]
            feeds = {name: _array(value) for name, value in zip(names, inputs, strict=False)}
            for ours, wanted in zip(session.run(None, feeds), expected, strict=True):
                _compare(ours, wanted, case)
    except Exception as error:  # noqa: BLE001  (any error is a failure)
        return f"{case.name}: {error}"
    return ""


def _array(value: Any) -> Any:
    return numpy_helper.to_array(value) if isinstance(value, onnx.TensorProto) else value


def _compare(ours: Any, wanted: Any, case: Case) -> None:
    wanted = _array(wanted)
    if wanted is None or isinstance(wanted, list):
        assert (ours is None) == (wanted is None)
        for one, other in zip(ours or [], wanted or [], strict=True):
            _compare(one, other, case)
        return
    wanted, ours = np.asarray(wanted), np.asarray(ours)
    assert ours.shape == wanted.shape
    if wanted.dtype.kind in "OUS":
        np.testing.assert_array_equal(ours, wanted)
        return
    if ours.dtype != wanted.dtype:  # ONNX Runtime returns the bits of types that NumPy lacks
        assert ours.dtype.itemsize == wanted.dtype.itemsize
        ours = ours.view(wanted.dtype)
    rtol = max(case.rtol, FLOAT16) if wanted.dtype == np.float16 else case.rtol
    if wanted.dtype.kind == "V":
        ours, wanted = ours.astype(np.float32), wanted.astype(np.float32)
    np.testing.assert_allclose(ours, wanted, rtol=rtol, atol=case.atol)


def test_cases_that_the_cpu_provider_passes_also_pass_with_flownpu(ep_devices: list[Any], tmp_path: Path) -> None:
    """With claim=all; where it takes any node, by default; and where it takes all, with on_unsupported=error.

    Among them are functions that ORT replaces by their bodies: the first GetCapability sees the function's node.
    """
    report = tmp_path / "placement.json"
    others = {"on_unsupported": "cpu"}
    failures, complete = [], 0
    for case in cases():
        report.unlink(missing_ok=True)
        failures.append(failure(case, (ep_devices[0], others | {"claim": "all", "placement": str(report)})))
        placement = json.loads(report.read_text(encoding="utf-8")) if report.exists() else {}
        if placement.get("claimed"):
            failures.append(failure(case, (ep_devices[0], others)))
        if placement.get("claimed") and placement["claimed"] == placement["nodes"]:
            complete += 1
            failures.append(failure(case, (ep_devices[0], {"on_unsupported": "error"})))
    print(f"{complete} cases are taken completely")
    assert not any(failures), "\n".join(filter(None, failures))
    assert len(cases()) > 1400  # onnx 1.23.2 and ONNX Runtime 1.31.1: 1446
    assert complete > 600
