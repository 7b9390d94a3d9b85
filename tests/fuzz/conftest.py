# SPDX-License-Identifier: Apache-2.0
"""Fixtures: a worker with ONNX Runtime alone, and one with the library under test."""

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
    """The reference worker and FlowNPU's, which is under the sanitizers if the tests are."""
    sanitize = "libasan" in os.environ.get("LD_PRELOAD", "")
    with Worker() as reference, Worker(library, sanitize=sanitize) as ours:
        yield reference, ours
