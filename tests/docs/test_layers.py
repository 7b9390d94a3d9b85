# SPDX-License-Identifier: Apache-2.0
"""The one rule between the folders (docs/architecture.md): a lower layer uses no higher one and names no model."""

import ast
import re

import pytest

from tests.docs.pages import ROOT

# What a folder may include or import of this project.
CXX = {"ops": {"ops", "aie"}, "ep": {"ep", "ops"}, "aie": {"aie"}, "python": {"python", "ops", "aie"}}
# The native module is the C++ of ops/.
PYTHON = {
    "aie": {"aie", "_native"},
    "ops": {"ops", "_native", "aie"},
    "graph_rewrites": {"graph_rewrites", "ops", "_native"},
}
INCLUDE = re.compile(r'^#include "(\w+)/', re.MULTILINE)
IMPORT = re.compile(r"^\s*(?:from|import) flownpu(?:\.(\w+))?(?: import (\w+))?", re.MULTILINE)
MODELS = re.compile(r"gemma|llama|qwen|siglip|mistral|phi[34]", re.IGNORECASE)


def sources(folders):
    files = [path for folder in folders for path in sorted((ROOT / folder).rglob("*"))]
    return [path for path in files if path.suffix in {".h", ".cc", ".py"}]


def name_of(path):
    return str(path.relative_to(ROOT))


def layer_of(path):
    return path.relative_to(ROOT).parts[0]


def code(path):
    """The file without its comments and docstrings, which may say where a technique comes from."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        return re.sub(r"//.*", "", text)
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            node.value.value = ""
    return ast.unparse(tree)


@pytest.mark.parametrize("path", [path for path in sources(CXX) if path.suffix != ".py"], ids=name_of)
def test_includes(path):
    assert set(INCLUDE.findall(code(path))) <= CXX[layer_of(path)]


@pytest.mark.parametrize("path", [path for path in sources(PYTHON) if path.suffix == ".py"], ids=name_of)
def test_imports(path):
    imported = {module or name for module, name in IMPORT.findall(code(path))}
    assert imported <= PYTHON[layer_of(path)]


@pytest.mark.parametrize("path", sources(["aie", "ep", "ops"]), ids=name_of)
def test_no_model_is_named(path):
    assert MODELS.findall(code(path)) == []
