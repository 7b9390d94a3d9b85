# SPDX-License-Identifier: Apache-2.0
"""`flownpu doctor` on what is installed beside FlowNPU: ONNX Runtime, GenAI, the provider's library."""

import sys

import pytest

from flownpu.doctor.checks import Check, Status
from flownpu.doctor.diagnosis import diagnose_software


def software(monkeypatch, versions):
    """The checks if modules have these distributions: {module: {distribution: version}}."""
    monkeypatch.setattr("flownpu.doctor.diagnosis.module_versions", lambda module: versions.get(module, {}))
    return {check.name: check for check in diagnose_software()}


GOOD = {"onnxruntime": {"onnxruntime": "1.31.1"}, "onnxruntime_genai": {"onnxruntime-genai": "0.18.0"}}


@pytest.mark.parametrize(
    ("flavours", "found", "remedy"),
    [
        ({}, "not installed", "pip install onnxruntime"),
        (
            {"onnxruntime": "1.20.1"},
            "FlowNPU needs onnxruntime 1.27 or newer, found 1.20.1",
            "pip install --upgrade onnxruntime",
        ),
        (
            {"onnxruntime": "1.31.1", "onnxruntime-gpu": "1.31.1"},
            "onnxruntime 1.31.1, onnxruntime-gpu 1.31.1: several flavours overwrite one another",
            "pip uninstall -y onnxruntime-gpu onnxruntime && pip install onnxruntime",
        ),
    ],
)
def test_unfit_onnxruntime_is_bad(monkeypatch, flavours, found, remedy):
    checks = software(monkeypatch, {**GOOD, "onnxruntime": flavours})
    assert checks["onnxruntime"] == Check("onnxruntime", Status.BAD, found, remedy)
    assert "registration" not in checks  # this check would fail for the same reason


def test_missing_genai_is_noted(monkeypatch):
    check = software(monkeypatch, {**GOOD, "onnxruntime_genai": {}})["onnxruntime-genai"]
    assert check.status is Status.NOTE
    assert check.remedy == 'pip install "flownpu[genai]"'


def test_library_that_does_not_load_is_bad(monkeypatch, tmp_path):
    (tmp_path / "libflownpu_ep.so").write_bytes(b"not a library")
    monkeypatch.setattr("flownpu.doctor.libraries.get_library_path", lambda: str(tmp_path / "libflownpu_ep.so"))
    checks = software(monkeypatch, GOOD)
    assert checks["provider library"].status is Status.BAD
    assert "does not load" in checks["provider library"].found
    assert "registration" not in checks


def test_package_without_library_is_bad(monkeypatch):
    monkeypatch.setattr(sys.modules["flownpu"], "__path__", ["/nowhere"])
    check = software(monkeypatch, GOOD)["provider library"]
    assert check.status is Status.BAD
    assert check.found == "libflownpu_ep.so is not in the flownpu package (looked in /nowhere)"
