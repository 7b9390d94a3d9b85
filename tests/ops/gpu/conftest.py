# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the tests of ops/gpu/."""

import numpy as np
import pytest

from tests.npu.models import Models
from tests.pocl import NOT_OPTIMISED


@pytest.fixture(scope="module")
def not_optimised(opencl, tmp_path_factory):
    """Kernels are not optimised, because those of few numbers run too shortly, and other tests' cache does not get
    them.
    """
    del opencl  # it sets the variables that are changed here
    with pytest.MonkeyPatch.context() as patch:
        for name, value in NOT_OPTIMISED.items():
            patch.setenv(name, value)
        patch.setenv("FLOWNPU_GPU_CACHE", str(tmp_path_factory.mktemp("not-optimised")))
        yield


@pytest.fixture
def rng(request):
    """A generator of random numbers that depend on the test's name alone."""
    return np.random.default_rng(list(request.node.name.encode()))


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """Small models by name, each made once."""
    return Models(tmp_path_factory.mktemp)
