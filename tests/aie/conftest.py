# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the tests of kernels."""

import numpy as np
import pytest

from tests.aie import host_kernels


@pytest.fixture(scope="session", params=host_kernels.ARCHITECTURES)
def kernels(request):
    """The kernels, for each architecture in turn."""
    return host_kernels.load(request.param)


@pytest.fixture
def rng(request):
    """A random generator whose numbers depend only on the test's name."""
    return np.random.default_rng(list(request.node.name.encode()))
