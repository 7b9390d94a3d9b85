# SPDX-License-Identifier: Apache-2.0
"""A single node on the emulated array, for all tests of this room."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.end_to_end.emulated_operators import Alone

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def alone(tmp_path: Path, ep_devices: list[Any]) -> Alone:
    return Alone(tmp_path, ep_devices[:1])
