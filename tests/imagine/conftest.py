# SPDX-License-Identifier: Apache-2.0
"""The trained pipeline as optimum exports it."""

import hashlib
from pathlib import Path

import pytest

from flownpu.errors import FlowNPUError
from scripts.environments import cache_folder, finished_folder
from tests.imagine import environment, pipelines
from tests.rewrites import optimum_export


@pytest.fixture(scope="session")
def exported() -> Path:
    """The folder, which is kept in the cache folder; tests are skipped where diffusers cannot be installed."""
    files = sorted(file for file in pipelines.CHECKPOINT.rglob("*") if file.is_file())
    digests = [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]
    made_of = [*digests, *environment.REQUIREMENTS, *optimum_export.REQUIREMENTS]
    try:
        environment.python()
    except FlowNPUError as error:
        pytest.skip(f"diffusers and optimum cannot be installed here: {error}")
    place = cache_folder() / "shapes-diffusion"
    with finished_folder(place, made_of) as folder:
        if folder is not None:
            pipelines.run({"task": "export", "checkpoint": pipelines.CHECKPOINT, "output": folder})
    return place
