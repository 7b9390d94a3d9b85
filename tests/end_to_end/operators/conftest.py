# SPDX-License-Identifier: Apache-2.0
"""A single node on the emulated array, for all tests of this room."""

from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.emulated_operators import Alone


@pytest.fixture
def alone(tmp_path: Path, ep_devices: list[Any]) -> Alone:
    return Alone(tmp_path, ep_devices[:1])
