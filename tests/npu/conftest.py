# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the tests of ops/npu/."""

import numpy as np
import pytest


@pytest.fixture
def rng(request):
    """A generator of random numbers that depend on the test's name alone."""
    return np.random.default_rng(list(request.node.name.encode()))


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """Small models by name, each made once."""
    from tests.npu.models import Models  # imports transformers, which processes of tests without models do not need

    return Models(tmp_path_factory.mktemp)
