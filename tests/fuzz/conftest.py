# SPDX-License-Identifier: Apache-2.0
"""Fixtures: a worker with ONNX Runtime alone, and one with the library under test."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

import pytest

from tests.fuzz.worker import Worker

Workers: TypeAlias = tuple[Worker, Worker]


@pytest.fixture(scope="session")
def workers(library: Path) -> Iterator[Workers]:
    """The reference worker and FlowNPU's, which is under the sanitizers if the tests are."""
    sanitize = "libasan" in os.environ.get("LD_PRELOAD", "")
    with Worker() as reference, Worker(library, sanitize=sanitize) as ours:
        yield reference, ours
