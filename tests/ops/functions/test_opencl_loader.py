# SPDX-License-Identifier: Apache-2.0
"""Which OpenCL the environment names afterwards, on made-up systems."""

from types import SimpleNamespace

import pytest

from flownpu.ops import opencl_loader

NAMES = ("FLOWNPU_OPENCL", "PYOPENCL_HOME", "OCL_ICD_VENDORS")
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


def test_the_systems_own(system):
    assert system(loader=True, implementation=True) == {}


def test_nothing_of_the_system(system):
    assert system(loader=False, implementation=False) == PACKAGES


def test_a_loader_without_an_implementation(system):
    assert system(loader=True, implementation=False) == PACKAGES


def test_an_implementation_without_a_loader(system, tmp_path):
    assert system(loader=False, implementation=True) == {**PACKAGES, "OCL_ICD_VENDORS": str(tmp_path)}


def test_without_packages(system):
    assert system(loader=False, implementation=False, packages={}) == {}


@pytest.mark.parametrize("name", ["FLOWNPU_OPENCL", "OCL_ICD_VENDORS"])
def test_what_the_environment_says_stays(system, name):
    assert system(loader=True, implementation=False, **{name: "mine"}) == {name: "mine"}
