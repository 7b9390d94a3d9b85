# SPDX-License-Identifier: Apache-2.0
"""`flownpu doctor` on the compilers of the NPU's programs."""

import pytest

from flownpu.doctor.checks import Check, Status
from flownpu.doctor.compilers import diagnose_compilers
from tests.cli.npu.stand_ins import Tools


@pytest.fixture
def tools(tmp_path, monkeypatch):
    return Tools(tmp_path / "tools", monkeypatch)


def test_compilers_that_go_together_are_good(tools):
    tools.wheels(mlir_aie="1.4.5", llvm_aie="22.0.0.2026092401+6dc4d6dd")
    found = "mlir_aie 1.4.5, llvm_aie 22.0.0.2026092401+6dc4d6dd, XRT Build Version: 2.25.00"
    assert list(diagnose_compilers()) == [Check("compilers", Status.GOOD, found)]


def test_older_compiler_is_named_with_both_versions(tools):
    tools.wheels(mlir_aie="1.4.2", llvm_aie="22.0.0.2026092401+6dc4d6dd")
    (check,) = diagnose_compilers()
    assert check.status is Status.BAD
    assert "found mlir_aie 1.4.2 with llvm_aie 22.0.0.2026092401+6dc4d6dd; expected mlir_aie 1.4.5 or" in check.found
    assert check.remedy.startswith("pip install 'mlir_aie>=1.4.5' -f ")


def test_peano_beside_no_aiecc_asks_for_it(tools, monkeypatch):
    tools.aiecc.unlink()
    monkeypatch.setenv("PATH", "")
    checks = list(diagnose_compilers())
    assert [check.remedy.split(" -f ")[0] for check in checks] == ["pip install 'mlir_aie>=1.4.5'"]


def test_machine_without_compilers_has_no_line(tools, monkeypatch):
    tools.aiecc.unlink()
    tools.clang.unlink()
    monkeypatch.setenv("PATH", "")
    assert list(diagnose_compilers()) == []
