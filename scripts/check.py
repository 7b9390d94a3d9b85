# SPDX-License-Identifier: Apache-2.0
"""The quick check: style, types and related tests of the files that differ from a commit. CI runs everything."""

import argparse
import re
import subprocess
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from scripts import lint

ROOT = lint.ROOT
# Folders and where their tests are, the deepest first. Subfolders correspond: those of `aie/cost/` are in
# `tests/aie/cost/`, if that exists.
FOLDERS = {
    "aie": "tests/aie",
    "ep": "tests/ep",
    "graph_rewrites": "graph_rewrites",
    "ops/npu": "tests/npu",
    "ops": "tests/ops",
    "python/flownpu": "tests",
    "python/native": "tests/ops",
    "scripts": "tests/scripts",
}
# Folders with tests of many things, or tests that take minutes: only those are run whose names match a changed file.
MANY = {"tests", "tests/aie", "tests/cli", "tests/fuzz"}
PAGES = "tests/docs/test_pages.py"


def main() -> int:
    """Runs the checks; the exit code is 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("base", nargs="?", help="commit or branch; files are compared with where HEAD left it [main]")
    arguments = parser.parse_args()
    base = branched_from(arguments.base or "main")
    if base is None and arguments.base:
        parser.error(f"expected a commit that has an ancestor in common with HEAD, got {arguments.base}")
    base = base or "HEAD"
    changed = lint.differing(base)
    if not changed:
        print(f"check: nothing differs from {base}")
        return 0
    tests = tests_of(changed)
    print(f"check: {len(changed)} files differ from {base}; tests in {len(tests)} files and folders")
    passed = subprocess.run([sys.executable, lint.__file__, "--changed", base], cwd=ROOT, check=False).returncode == 0
    if tests:
        command = [sys.executable, "-m", "pytest", "--quiet", "-m", "not slow", *parallel(tests), *selection(changed)]
        passed &= subprocess.run([*command, *tests], cwd=ROOT, check=False).returncode in (0, NO_TESTS)
    print("check: passed" if passed else "check: failed")
    return 0 if passed else 1


NO_TESTS = 5  # pytest's exit code if no test is selected


def parallel(tests: list[str]) -> list[str]:
    """Arguments of pytest: several processes, if there are enough tests for them."""
    if len(tests) == 1:
        return []
    return ["--numprocesses", "auto", "--maxprocesses", "4", "--dist", "loadfile", "--max-worker-restart", "0"]


def selection(changed: Iterable[Path]) -> list[str]:
    """Arguments of pytest: the tests of code blocks in pages, which take seconds each, only for pages that changed."""
    pages = [file.as_posix() for file in changed if file.suffix == ".md"]
    return ["-k", " or ".join(["not test_block_runs", *pages])]


def branched_from(commit: str) -> str | None:
    """The last commit that HEAD has in common with a commit or branch; None if there is none.

    Commits that a branch got after HEAD left it are not compared with.
    """
    done = subprocess.run(["git", "merge-base", "HEAD", commit], cwd=ROOT, check=False, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else None


def tests_of(changed: Iterable[Path]) -> list[str]:
    """The test files and folders that belong to these files; files that were removed have none."""
    found: set[Path] = set()
    for file in changed:
        found |= {ROOT / test for test in tests_of_file(file)} if (ROOT / file).exists() else set()
    inside = {file for file in found if any(folder in found for folder in file.parents)}
    return sorted(str(file.relative_to(ROOT)) for file in found - inside)


def tests_of_file(file: Path) -> set[str]:
    """The tests of a file: those in the folder for its folder, those with its name, and those that import it.

    If there are none: those with its folder's name, or that import a module which imports it. The name of a module that
    tests share says nothing of others.
    """
    if is_test(file):
        return {file.as_posix()}
    if file.suffix == ".md" or file.parts[0] == "docs":
        return {"tests/docs"}
    found = {mirror} if (mirror := mirror_of(file)) and mirror not in MANY else set()
    if file.suffix not in lint.SOURCES:
        return found
    found |= importing(file, test_files())
    if file.parts[0] == "tests":  # a module that tests share
        return found if has_tests(found) else importing_through_others(file)
    found |= named(file.parent.name if file.stem == "__init__" else file.stem)
    if not found:
        users = [Path(user) for user in importing(file, source_files())]
        found = named(file.parent.name).union(*(importing(user, test_files()) for user in users))
    return found


def mirror_of(file: Path) -> str:
    """The folder with the tests of a file's folder; "" if there is none."""
    if file.parts[0] == "tests":  # a module that tests share
        return file.parent.as_posix()
    source = next((folder for folder in FOLDERS if file.is_relative_to(folder)), None)
    if source is None:
        return ""
    mirror = Path(FOLDERS[source])
    for part in file.parent.relative_to(source).parts:
        if (ROOT / mirror / part).is_dir():
            mirror /= part
    return mirror.as_posix()


def named(name: str) -> set[str]:
    """The tests in whose file's name this name is a word."""
    pattern = re.compile(rf"(^|_){re.escape(name.strip('_'))}(_|\.)")
    return {test.as_posix() for test in test_files() if pattern.search(test.name)}


def importing(file: Path, files: Iterable[Path]) -> set[str]:
    """The files among `files` that import the Python module `file`."""
    if file.suffix != ".py":
        return set()
    module = ".".join(file.with_suffix("").parts).removeprefix("python.").removesuffix(".__init__")
    module = module if module.startswith(("flownpu", "tests", "scripts")) else f"flownpu.{module}"
    package, _, name = module.rpartition(".")
    ways = rf"\b{re.escape(module)}\b|from {re.escape(package)} import [^\n]*\b{re.escape(name)}\b"
    pattern = re.compile(ways)
    texts = {user: text_of(user) for user in files if user != file}
    # Most files do not have the name at all; looking for it takes a hundredth of the pattern's time.
    return {str(user) for user, text in texts.items() if name in text and pattern.search(text)}


def has_tests(places: Iterable[str]) -> bool:
    """Whether pytest collects anything in these files and folders."""
    return any(test.is_relative_to(place) for place in places for test in test_files())


def importing_through_others(file: Path) -> set[str]:
    """The tests that import a module of tests, or another module of tests that imports it, and so on."""
    found: set[str] = set()
    modules, waiting = python_files("tests"), [file]
    for module in waiting:
        users = [Path(user) for user in importing(module, modules)]
        found |= {user.as_posix() for user in users if is_test(user)}
        waiting += [user for user in users if not is_test(user) and user not in waiting]
    return found


@cache
def text_of(file: Path) -> str:
    """The text of a file."""
    return (ROOT / file).read_text(encoding="utf-8")


def is_test(file: Path) -> bool:
    """Whether pytest collects the file."""
    return file.suffix == ".py" and (file.name.startswith("test_") or file.name.endswith("_test.py"))


def python_files(*folders: str) -> list[Path]:
    """All Python files in these folders."""
    return [file.relative_to(ROOT) for folder in folders for file in sorted((ROOT / folder).rglob("*.py"))]


@cache
def test_files() -> list[Path]:
    """All files that pytest collects."""
    return [file for file in python_files("tests", "graph_rewrites") if is_test(file)]


@cache
def source_files() -> list[Path]:
    """The modules of the package."""
    return [file for file in python_files("aie", "graph_rewrites", "ops", "python") if not is_test(file)]


if __name__ == "__main__":
    sys.exit(main())
