# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the tests of ops/gpu/."""

import numpy as np
import pytest

from tests.npu.models import Models


@pytest.fixture
def rng(request):
    """Numbers that depend on the test's name alone."""
    return np.random.default_rng(list(request.node.name.encode()))


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """Small models by name, each made once."""
    return Models(tmp_path_factory.mktemp)
