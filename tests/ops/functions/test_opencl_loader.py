# SPDX-License-Identifier: Apache-2.0
"""The OpenCL that the environment names after the call, on made-up systems."""

from types import SimpleNamespace

import pytest

from flownpu.system import opencl_loader

PACKAGES = {"FLOWNPU_OPENCL": "/p/.libs/libOpenCL.so", "PYOPENCL_HOME": "/p", "OCL_ICD_VENDORS": "/p/.libs/libpocl.so"}


@pytest.fixture
def system(monkeypatch, tmp_path):
    """Makes a system, uses the installed packages there, and returns the environment's variables."""

    def make(*, loader, implementation, packages=PACKAGES, **environment):
        monkeypatch.setattr(opencl_loader, "OPENCL_LOADER", "libm.so.6" if loader else "libNoSuch.so")
        monkeypatch.setattr(opencl_loader, "_VENDORS", tmp_path)
        monkeypatch.setattr(opencl_loader, "installed_packages", lambda: dict(packages))
        if implementation:
            (tmp_path / "mesa.icd").write_text("libRusticlOpenCL.so.1")
        said = dict(environment)
        monkeypatch.setattr(opencl_loader, "os", SimpleNamespace(environ=said))
        opencl_loader.use_installed_packages()
        return said

    return make


def test_system_with_loader_and_implementation_sets_nothing(system):
    assert system(loader=True, implementation=True) == {}


def test_system_without_opencl_takes_packages(system):
    assert system(loader=False, implementation=False) == PACKAGES


def test_loader_without_implementation_takes_packages(system):
    assert system(loader=True, implementation=False) == PACKAGES


def test_implementation_without_loader_takes_loader_of_package(system, tmp_path):
    assert system(loader=False, implementation=True) == {**PACKAGES, "OCL_ICD_VENDORS": str(tmp_path)}


def test_missing_packages_set_nothing(system):
    assert system(loader=False, implementation=False, packages={}) == {}


@pytest.mark.parametrize("name", ["FLOWNPU_OPENCL", "OCL_ICD_VENDORS"])
def test_variables_already_set_are_kept(system, name):
    assert system(loader=True, implementation=False, **{name: "mine"}) == {name: "mine"}
