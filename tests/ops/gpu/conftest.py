# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the tests of ops/gpu/."""

import pytest

from tests.pocl import NOT_OPTIMISED


@pytest.fixture(scope="module")
def not_optimised(opencl, tmp_path_factory):
    """Kernels are not optimised, which takes longer than they run; other tests' cache does not get them."""
    del opencl  # it sets the variables that are changed here
    with pytest.MonkeyPatch.context() as patch:
        for name, value in NOT_OPTIMISED.items():
            patch.setenv(name, value)
        patch.setenv("FLOWNPU_GPU_CACHE", str(tmp_path_factory.mktemp("not-optimised")))
        yield
