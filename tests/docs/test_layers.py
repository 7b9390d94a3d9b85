# SPDX-License-Identifier: Apache-2.0
"""The rules between the folders (docs/architecture.md): a lower layer uses no higher one and names no model, packages
import one another in one direction only, and no file's name repeats its folder's."""

import ast
import re
from collections import defaultdict
from functools import cache
from pathlib import PurePosixPath

from tests.docs.pages import ROOT, table

# The folders that a folder may include or import.
CXX = {"ops": {"ops", "aie"}, "ep": {"ep", "ops"}, "aie": {"aie"}, "python": {"python", "ops", "aie"}}
# The native module is the C++ of ops/; `system` has what differs between operating systems, and is below all else.
PYTHON = {
    "aie": {"aie", "_native"},
    "ops": {"ops", "_native", "aie", "system"},
    "python/flownpu/system": {"system"},
    "graph_rewrites": {"graph_rewrites", "ops", "_native"},
}
INCLUDE = re.compile(r'^#include "([\w/.]+)"', re.MULTILINE)
NAME_IN_CODE = re.compile(r"`([^`]+)`")
MODELS = re.compile(r"gemma|llama|qwen|siglip|mistral|phi[34]", re.IGNORECASE)


def sources(*folders, suffixes=(".h", ".cc", ".py")):
    files = [path for folder in folders for path in sorted((ROOT / folder).rglob("*"))]
    found = [path for path in files if path.suffix in suffixes]
    assert found, f"{folders} have no {suffixes}: the test looks at nothing"
    return found


def name_of(path):
    return path.relative_to(ROOT).as_posix()


def code(path):
    """The file without its comments and docstrings, which may name the source of a technique."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        return re.sub(r"//.*", "", text)
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            node.value.value = ""
    return ast.unparse(tree)


def installed(path):
    """The place of a Python file in the package: the tree's folders belong to flownpu."""
    name = name_of(path)
    return name.removeprefix("python/") if name.startswith("python/") else f"flownpu/{name}"


def imports(path):
    """The dotted names that a file imports of this project, whole: `from a import b` is a.b."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from (name for name in names if name.split(".")[0] == "flownpu")


def offenders(found):
    """One line for each file with its fault."""
    return [f"{file}: {', '.join(sorted(wrong))}" for file, wrong in found if wrong]


def test_layer_includes_only_allowed_layers():
    found = []
    for layer, allowed in CXX.items():
        for path in sources(layer, suffixes=(".h", ".cc")):
            used = {include.split("/")[0] for include in INCLUDE.findall(code(path)) if "/" in include}
            found.append((name_of(path), used - allowed))
    assert offenders(found) == []


def test_layer_imports_only_allowed_layers():
    found = []
    for layer, allowed in PYTHON.items():
        files = sources(layer, suffixes=(".py",))
        found += [(name_of(path), {name.split(".")[1] for name in imports(path)} - allowed) for path in files]
    assert offenders(found) == []


def test_lower_layers_name_no_model():
    assert offenders((name_of(path), set(MODELS.findall(code(path)))) for path in sources("aie", "ep", "ops")) == []


def circles(uses):
    """Folders that use themselves through other folders, at each level of the tree.

    A folder counts with all that is in it; a file beside folders counts by itself. Two files of one folder may use each
    other.

    Args:
        uses: for each file, the files that it uses.
    """
    beside = defaultdict(lambda: defaultdict(set))  # for each folder: the uses within it
    for file, used in uses.items():
        for other in used:
            parts, others = PurePosixPath(file).parts, PurePosixPath(other).parts
            level = next(i for i, (one, two) in enumerate(zip(parts, others, strict=False)) if one != two)
            beside[parts[:level]][parts[level]].add(others[level])
    found = set()
    for folder, graph in beside.items():
        for start in [name for name in graph if "." not in name]:
            ways, reached = [(start, other) for other in graph[start]], set()
            while ways:
                way = ways.pop(0)
                if way[-1] == start:
                    found.add(f"{'/'.join(folder)}: {' -> '.join(way)}")
                    break
                if way[-1] not in reached:
                    reached.add(way[-1])
                    ways += [(*way, other) for other in graph.get(way[-1], ())]
    return sorted(found)


@cache
def uses_of_python():
    """For each installed file, the files that it imports. Imports for types count as well, because a reader needs the
    types of a file.
    """
    files = {
        installed(path): path for path in sources("aie", "ops", "graph_rewrites", "python/flownpu", suffixes=(".py",))
    }
    modules = {}
    for file in files:
        modules[file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")] = file
    uses = {}
    for file, path in files.items():
        used = {modules.get(name) or modules.get(name.rpartition(".")[0]) for name in imports(path)}
        uses[file] = used - {None, file}
    return uses


@cache
def uses_of_cxx():
    """For each file the files that it includes."""
    paths = {
        name_of(path): path for path in sources("aie", "ops", "ep", "python/native", suffixes=(".h", ".cc", ".hpp"))
    }
    return {file: set(INCLUDE.findall(code(path))) & set(paths) - {file} for file, path in paths.items()}


def test_packages_import_without_circles():
    assert circles(uses_of_python()) == []


def test_cxx_folders_include_without_circles():
    """Headers count with their folder, because a changed header recompiles the files that include it."""
    assert circles(uses_of_cxx()) == []


def levels(cell):
    """For each name in a row of the table of rooms, its chain and its level there; dashes separate levels."""
    found = {}
    for chain in cell.split(";"):
        for level, names in enumerate(chain.split(" – ")):
            found |= {name.removesuffix(".h"): (chain, level) for name in NAME_IN_CODE.findall(names)}
    return found


def upward(rooms, uses):
    """The files that use a higher room of their chain."""

    def place(file):
        """Chain and level of the file, or of the innermost room that contains it; None if neither is named."""
        path = PurePosixPath(file)
        return next(
            (rooms[str(name)] for name in (path, path.with_suffix(""), *path.parents) if str(name) in rooms), None
        )

    found = []
    for file, used in uses.items():
        for other in used:
            lower, higher = place(file), place(other)
            if lower and higher and lower[0] == higher[0] and lower[1] < higher[1]:
                found.append(f"{file} uses {other}")
    return sorted(found)


def inside(folder, uses):
    """For each file of a folder, the files of the same folder that it uses; names are those inside the folder."""
    return {
        file.removeprefix(folder): {other.removeprefix(folder) for other in used if other.startswith(folder)}
        for file, used in uses.items()
        if file.startswith(folder)
    }


def test_rooms_use_only_lower_rooms():
    for row in table("docs/architecture.md", "layer"):
        (layer,), rooms = NAME_IN_CODE.findall(row[0]), levels(row[1])
        assert len(rooms) > 3, row
        folder = layer.removeprefix("python/") if layer.startswith("python/") else layer
        package = folder if folder.startswith("flownpu/") else f"flownpu/{folder}"
        of_python = inside(package, uses_of_python())
        assert upward(rooms, of_python) == [], layer
        assert upward(rooms, inside(layer, uses_of_cxx())) == [], layer


def test_uses_of_higher_rooms_are_found():
    rooms = levels("`f.h` – `a`, `b` – `a/c`; `d` – `e`")
    assert upward(rooms, {"a/x.cc": {"f.h", "b/y.h"}, "a/c/z.h": {"a/x.h"}, "f.cc": {"d/w.h"}}) == []
    assert upward(rooms, {"f.cc": {"a/x.h"}, "a/y.h": {"a/c/z.h"}, "d/w.h": {"e/v.h"}}) == [
        "a/y.h uses a/c/z.h",
        "d/w.h uses e/v.h",
        "f.cc uses a/x.h",
    ]


def test_circles_are_found_at_each_level():
    assert circles({"a/x.py": {"b/y.py"}, "b/z.py": {"a/w.py"}}) == [": a -> b -> a", ": b -> a -> b"]
    assert circles({"p/a/x.py": {"p/f.py"}, "p/f.py": {"p/a/y.py"}}) == ["p: a -> f.py -> a"]
    assert circles({"a/x.py": {"a/y.py"}, "a/y.py": {"a/x.py", "b/z.py"}}) == []


def test_file_names_do_not_repeat_their_folders():
    folders = ("aie", "ep", "ops", "graph_rewrites", "python")
    found = [name_of(path) for path in sources(*folders) if path.stem.startswith(f"{path.parent.name}_")]
    assert found == []


def test_folders_have_at_most_20_files():
    """A reader grasps some 20 file names at once. If there are more, some of them belong in a separate room."""
    files = defaultdict(int)
    folders = ("aie", "benchmarks", "docs", "ep", "graph_rewrites", "ops", "python", "scripts", "tests")
    for path in sources(*folders, suffixes=(".h", ".cc", ".py", ".md")):
        files[name_of(path.parent)] += 1
    assert [folder for folder, count in files.items() if count > 20] == []
