# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the tests of kernels."""

import pytest

from tests.aie import host_kernels


@pytest.fixture(scope="session", params=host_kernels.ARCHITECTURES)
def kernels(request):
    """The kernels, for each architecture in turn."""
    return host_kernels.load(request.param)
