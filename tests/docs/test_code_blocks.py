# SPDX-License-Identifier: Apache-2.0
"""The code blocks in the documentation work."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.docs.pages import PAGES, ROOT, Block, blocks


def test_code_blocks_except_builds_are_marked_as_tested():
    texts = {page.relative_to(ROOT).as_posix(): page.read_text(encoding="utf-8") for page in PAGES}
    fenced = {name: text.count("```") // 2 for name, text in texts.items() if "```" in text}
    for block in blocks():
        fenced[block.page] -= 1
    # tests/serve/test_scale.py runs these.
    fenced["docs/use/scale.md"] -= texts["docs/use/scale.md"].count("<!-- tested with Ray -->")
    # tests/serve/test_service_page.py starts the commands of these, a systemd unit and a container file.
    fenced["docs/use/service.md"] -= 2
    # README: installing, make demo and make test; CONTRIBUTING: make lint, make test; architecture: fuzzing; releasing,
    # windows: make
    builds = {"README.md": 2, "CONTRIBUTING.md": 1, "docs/architecture.md": 1, "docs/releasing.md": 1}
    builds["docs/use/windows.md"] = 2
    assert {name: count for name, count in fenced.items() if count} == builds


@pytest.mark.parametrize("block", blocks(), ids=lambda block: f"{block.page}-{block.language}")
def test_marked_code_block_succeeds(block: Block, tmp_path: Path, converted: Callable[..., Path]):
    for folder in ("tests", "docs", ".git", "ops"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    model = "out/gemma3-topics"
    if model in block.text and f" {model}\n" not in block.text.partition("flownpu convert")[2]:
        (tmp_path / "out").mkdir()
        (tmp_path / model).symlink_to(converted())
    command = {"sh": ["bash", "-eu", "-c", block.text], "python": [sys.executable, "-c", block.text]}[block.language]
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
