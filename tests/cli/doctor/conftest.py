# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the tests of `flownpu doctor`."""

import pytest

from tests.cli.doctor.machines import MadeUp


@pytest.fixture
def machine(tmp_path):
    return MadeUp(tmp_path)
