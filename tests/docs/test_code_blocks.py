# SPDX-License-Identifier: Apache-2.0
"""The commands that the documentation tells readers to type work."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from flownpu.convert import convert
from tests.docs.pages import PAGES, ROOT, Block, blocks


def test_pages_have_blocks_to_test():
    pages = ("model-gemm", "npu-designs", "operators", "q4nx", "use/bring-your-model", "use/images", "use/options")
    assert {block.page for block in blocks()} == {
        "README.md",
        "CONTRIBUTING.md",
        *(f"docs/{page}.md" for page in pages),
    }
    # A block that readers are to type is marked; what is not is a fragment, or the build itself.
    texts = [page.read_text(encoding="utf-8") for page in PAGES]
    # Where Ray is installed, tests/serve/test_scale.py runs two.
    with_ray = sum(text.count("<!-- tested with Ray -->") for text in texts)
    unmarked = sum(text.count("```") for text in texts) // 2 - len(blocks()) - with_ray
    # README: make demo, make test; CONTRIBUTING: make check, make test; robustness: fuzzing; releasing, windows: make
    assert unmarked == 6


@pytest.mark.parametrize("block", blocks(), ids=lambda block: f"{block.page}-{block.language}")
def test_block_runs(block: Block, tmp_path: Path):
    for folder in ("tests", "docs", ".git", "ops"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    model = "out/gemma3-topics"
    if model in block.text and f" {model}\n" not in block.text.partition("flownpu convert")[2]:
        convert(ROOT / "tests" / "fixtures" / "gemma3-topics", tmp_path / model)
    command = {"sh": ["bash", "-eu", "-c", block.text], "python": [sys.executable, "-c", block.text]}[block.language]
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
