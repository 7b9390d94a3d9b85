# SPDX-License-Identifier: Apache-2.0
"""The table of which build runs which tests."""

from pathlib import Path

import pytest

from tests.builds import BOTH, BUILDS, FIRST, RELEASED, SANITIZED, TOGETHER, build_of_name, has_none

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("beginning", [*BUILDS, *FIRST, *TOGETHER])
def test_beginning_is_that_of_a_test(beginning):
    """A renamed file would run in another build without a word."""
    path, _, test = beginning.partition("::")
    assert (ROOT / path).exists()
    assert f"def {test}(" in (ROOT / path).read_text() if test else True


@pytest.mark.parametrize(
    ("name", "build", "ignored"),
    [
        ("tests/cli", RELEASED, True),
        ("tests/aie", RELEASED, False),  # has files of both
        ("tests/aie/host/test_host.py::test_a", BOTH, False),
        ("tests/ops/lowering/test_a.py", SANITIZED, False),
        ("tests/ops/test_int8_cache.py", RELEASED, True),
    ],
)
def test_longest_beginning_decides(name, build, ignored):
    assert build_of_name(name) == build
    assert has_none(name, SANITIZED) is ignored
    assert not has_none(name, RELEASED)
