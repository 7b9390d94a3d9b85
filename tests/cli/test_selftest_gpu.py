# SPDX-License-Identifier: Apache-2.0
"""`flownpu selftest --device gpu` on PoCL: the table, the report, and kernels that are wrong."""

import dataclasses
import json

import pytest

from flownpu.cli import main
from flownpu.selftest.gpu import trials

pytestmark = [pytest.mark.opencl, pytest.mark.usefixtures("pocl")]
TWO = ("--only", "rms_norm", "--only", "fused_dqp, narrow")


def selftest(folder, *options):
    return main(["selftest", "--device", "gpu", "--output", str(folder), *TWO, *options])


def test_gpu_selftest_writes_table_and_report(tmp_path, capfd):
    assert selftest(tmp_path) == 0
    shown = capfd.readouterr().out
    assert "2 of 2 kernels passed" in shown
    assert "Portable Computing Language" in shown
    assert "A CPU computed: its times say nothing of a GPU's" in shown
    report = json.loads((tmp_path / "gpu" / "report.json").read_text())
    assert (report["device"], report["passed"], report["is_software"]) == ("gpu", True, True)
    assert report["facts"]["kind"] == "cpu"
    assert report["facts"]["compute_units"] >= 1
    assert report["stored_type"] == "fp32 (the device does not compute in half precision)"  # PoCL 3.0
    assert [each["variant"] for each in report["variants"]] == ["fused_dqp, narrow", "rms_norm"]
    product = report["variants"][0]
    assert 0 < product["share"] <= 1
    assert product["kernels"].keys() == {"fused_dqp"}
    assert product["seconds"] == pytest.approx(sum(product["kernels"].values()))
    assert product["read"] == 3 * 11 * 640  # row blocks, groups, bytes of a block


def test_gpu_selftest_takes_vulkan(lavapipe, tmp_path, capfd):
    del lavapipe
    assert selftest(tmp_path, "--gpu-api", "vulkan") == 0
    assert "2 of 2 kernels passed" in capfd.readouterr().out
    report = json.loads((tmp_path / "gpu" / "report.json").read_text())
    assert report["facts"]["platform"] == "Vulkan, llvmpipe"


def test_json_option_prints_report_alone(tmp_path, capfd):
    assert selftest(tmp_path, "--json", "-") == 0
    assert json.loads(capfd.readouterr().out) == json.loads((tmp_path / "gpu" / "report.json").read_text())


def test_wrong_or_failing_kernel_is_reported(tmp_path, capfd, monkeypatch):
    """All other kernels are still tested, and the exit code is 1."""
    known = trials.variants()

    def changed(**parts):
        del parts
        norm, product = (next(each for each in known if each.name == name) for name in TWO[1::2])
        off = lambda rng: dataclasses.replace(norm.make(rng), attributes={"axis": -1, "epsilon": 0.5})  # noqa: E731
        no_such = lambda rng: dataclasses.replace(product.make(rng), attributes={"M": 5, "K": 5})  # noqa: E731
        return [dataclasses.replace(norm, make=off), dataclasses.replace(product, make=no_such)]

    monkeypatch.setattr(trials, "variants", changed)
    assert selftest(tmp_path) == 1
    said = capfd.readouterr()
    assert "0 of 2 kernels passed" in said.out
    assert "rms_norm: wrong: output 0:" in said.err
    assert "fused_dqp, narrow: failed: [FusedDQP" in said.err


def test_unknown_kernel_is_refused(tmp_path, capfd):
    assert selftest(tmp_path, "--only", "no_such*") == 2
    assert "'fused_dqp, wide'" in " ".join(capfd.readouterr().err.split())
