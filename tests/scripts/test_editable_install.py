# SPDX-License-Identifier: Apache-2.0
"""`pip install -e .`: Python modules are imported from the tree, the compiled module from the installation."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from flownpu import _native

ROOT = Path(__file__).parents[2]
# An editable install is a file that `site` reads in the folder of packages; here that folder is the test's own.
START = "import site; site.addsitedir({folder!r}); "
TREE = (
    "CMakeLists.txt",
    "LICENSE",
    "LICENSES.md",
    "README.md",
    "pyproject.toml",
    "aie",
    "graph_rewrites",
    "ops",
    "python",
)
# Installs this Python's native module, in place of minutes of compiling.
BUILD = f"""
cmake_minimum_required(VERSION 3.25)
project(flownpu LANGUAGES NONE)
install(FILES {_native.__file__} DESTINATION flownpu)
"""


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tree, of which nothing is compiled, installed into the folder `installed` beside it."""
    pytest.importorskip("scikit_build_core", reason="needs the extra dev")
    folder = tmp_path_factory.mktemp("editable")
    tree = folder / "tree"
    tree.mkdir()
    for name in TREE:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tree / name, **({"symlinks": True} if (ROOT / name).is_dir() else {}))
    (tree / "CMakeLists.txt").write_text(BUILD)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-build-isolation", "--no-deps"]
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        [*command, "--target", str(folder / "installed"), "-e", str(tree)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return tree


def run(tree: Path, code: str) -> str:
    """The output of code in a Python with the editable install, beside this Python's own packages."""
    start = START.format(folder=str(tree.parent / "installed"))
    done = subprocess.run([sys.executable, "-c", start + code], capture_output=True, text=True, check=False, cwd="/")
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize(
    ("module", "file"),
    [
        ("flownpu", "python/flownpu/__init__.py"),
        ("flownpu.cli", "python/flownpu/cli/__init__.py"),
        ("flownpu.ops.q4nx", "ops/q4nx.py"),
        ("flownpu.aie.designs", "aie/designs/__init__.py"),
        ("flownpu.graph_rewrites", "graph_rewrites/__init__.py"),
    ],
)
def test_editable_modules_are_in_the_tree(tree: Path, module: str, file: str) -> None:
    found = run(tree, f"from importlib.util import find_spec; print(find_spec({module!r}).origin)")
    assert Path(found).resolve() == (tree / file).resolve()


def test_edit_in_ops_is_seen_at_once(tree: Path) -> None:
    (tree / "ops" / "error_texts.py").write_text("said = 'before'\n")
    code = "import importlib; from flownpu.ops import {name}; print({name}.{value})"
    module = tree / "ops" / "q4nx.py"
    text = module.read_text(encoding="utf-8")
    module.write_text(text + "\nEDITED = 'this very edit'\n", encoding="utf-8")
    assert run(tree, code.format(name="q4nx", value="EDITED")) == "this very edit"
    # A file that is new since the install is found, too.
    assert run(tree, "import flownpu.ops.error_texts as new; print(new.said)") == "before"


def test_compiled_library_is_found_in_editable_install(tree: Path) -> None:
    assert run(tree, "import flownpu._native as native; print(native.__file__)").startswith(
        str(tree.parent / "installed")
    )
