# SPDX-License-Identifier: Apache-2.0
"""The part of Vulkan's interface that FlowNPU declares, against Khronos' headers."""

import shutil
import subprocess
from pathlib import Path

import pytest

from scripts import tools

CHECK = Path(__file__).with_name("abi_check.cc")
TREE = CHECK.parents[4]


@pytest.mark.parametrize("tool", ["vulkan", "lavapipe"])
def test_declarations_equal_headers(tool):
    """Sizes, places of members and numbers; the compiler compares them. The second has newer headers."""
    headers = tools.folder_of(tool) / "root/usr/include"
    if not (headers / "vulkan").is_dir():
        pytest.skip(f"there are no headers of Vulkan: python -m scripts.tools {tool} gets them")
    if shutil.which("g++") is None:
        pytest.skip("there is no g++")
    command = ["g++", "-std=c++20", "-fsyntax-only", f"-I{TREE}", f"-I{headers}", str(CHECK)]
    said = subprocess.run(command, capture_output=True, text=True, check=False)
    assert said.returncode == 0, said.stderr
