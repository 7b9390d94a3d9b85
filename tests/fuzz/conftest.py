# SPDX-License-Identifier: Apache-2.0
"""Workers with ONNX Runtime alone, and with the library that is tested."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, TypeAlias

import pytest

from tests.fuzz.worker import Worker

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

Workers: TypeAlias = tuple[Worker, Worker]


@pytest.fixture(scope="session")
def workers(library: Path) -> Iterator[Workers]:
    """The reference and ours; under the sanitizers where the tests are."""
    sanitize = "libasan" in os.environ.get("LD_PRELOAD", "")
    with Worker() as reference, Worker(library, sanitize=sanitize) as ours:
        yield reference, ours
