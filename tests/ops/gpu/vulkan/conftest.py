# SPDX-License-Identifier: Apache-2.0
"""Lavapipe for the tests of ops/gpu/vulkan/."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import lavapipe as packages


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the module's compiled kernels."""
    return tmp_path_factory.mktemp("vulkan")


@pytest.fixture(scope="module", autouse=True)
def lavapipe(kept: Path) -> Iterator[dict[str, str]]:
    """Sets the environment for Vulkan on the CPU; skips the test, with the reason, if it is not there."""
    try:
        variables = packages.variables(kept)
    except packages.MissingError as missing:
        pytest.skip(str(missing))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        yield variables
