# SPDX-License-Identifier: Apache-2.0
"""The quick check: style, types and related tests of the files that differ from a commit. CI runs everything.

python -m scripts.check [BASE]           runs it, as `make check` does
python -m scripts.check [BASE] --list    prints the files that differ, for pre-commit
"""

import argparse
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Folders with the folders of their tests, the deepest first. Subfolders correspond: tests of `aie/cost/` are in
# `tests/aie/cost/`, if it exists.
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
# Folders with tests of many parts, or with tests that take minutes. Only tests whose names match a changed file are
# run.
MANY = {"tests", "tests/aie", "tests/cli", "tests/fuzz"}
_NO_TESTS = 5  # pytest's exit code if no test is selected


def main() -> int:
    """Runs the checks; the exit code is 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("base", nargs="?", help="commit or branch; files are compared with where HEAD left it [main]")
    parser.add_argument("--list", action="store_true", help="print the files that differ instead")
    arguments = parser.parse_args()
    base = branched_from(arguments.base or "main")
    if base is None and arguments.base:
        parser.error(f"expected a commit that has an ancestor in common with HEAD, got {arguments.base}")
    changed = differing(base or "HEAD")
    if arguments.list:
        print(*changed, sep="\n")
        return 0
    tests = tests_of(changed)
    print(f"check: {len(changed)} files differ from {base or 'HEAD'}; tests in {len(tests)} files and folders")
    style = ["pre-commit", "run", "--files", *map(str, changed)]
    passed = subprocess.run(style, cwd=ROOT, check=False).returncode == 0
    if tests:
        several = ["--numprocesses", "auto", "--maxprocesses", "4", "--dist", "loadfile", "--max-worker-restart", "0"]
        command = [sys.executable, "-m", "pytest", "--quiet", "-m", "not slow", *selection(changed)]
        command += [*(several if len(tests) > 1 else []), *tests]
        passed &= subprocess.run(command, cwd=ROOT, check=False).returncode in (0, _NO_TESTS)
    print("check: passed" if passed else "check: failed")
    return 0 if passed else 1


def branched_from(commit: str) -> str | None:
    """The last commit that HEAD has in common with a commit or branch; None if there is none.

    Later commits of the branch are not compared.
    """
    done = subprocess.run(["git", "merge-base", "HEAD", commit], cwd=ROOT, check=False, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else None


def differing(base: str) -> list[Path]:
    """The existing files that differ from a commit, and those that git does not track."""
    names = []
    for command in (["diff", "--name-only", base], ["ls-files", "--others", "--exclude-standard"]):
        done = subprocess.run(["git", *command], cwd=ROOT, check=True, capture_output=True, text=True)
        names += done.stdout.splitlines()
    return [Path(name) for name in names if (ROOT / name).is_file()]


def selection(changed: Iterable[Path]) -> list[str]:
    """Arguments of pytest: the tests of code blocks in pages, which take seconds each, only for pages that changed."""
    pages = [file.as_posix() for file in changed if file.suffix == ".md"]
    return ["-k", " or ".join(["not test_marked_code_block_succeeds", *pages])]


def tests_of(changed: Iterable[Path]) -> list[str]:
    """The tests to run for these files; a file inside a listed folder is left out."""
    found = {ROOT / test for file in changed for test in tests_of_file(file)}
    inside = {file for file in found if any(folder in found for folder in file.parents)}
    return sorted(str(file.relative_to(ROOT)) for file in found - inside)


def tests_of_file(file: Path) -> set[str]:
    """The tests of a file: the folder for its folder, those with its name or its folder's, and those that import it."""
    if is_test(file):
        return {file.as_posix()}
    if file.suffix == ".md" or file.parts[0] == "docs":
        return {"tests/docs"}
    found = {mirror} if (mirror := mirror_of(file)) and mirror not in MANY else set()
    if file.suffix not in (".cc", ".h", ".py"):
        return found
    module = ".".join(file.with_suffix("").parts).removeprefix("python.").removesuffix(".__init__")
    package, _, name = module.rpartition(".")
    uses = re.compile(rf"\b{re.escape(module)}\b|from (flownpu\.)?{re.escape(package)} import [^\n]*\b{name}\b")
    tests = [test for folder in ("tests", "graph_rewrites") for test in (ROOT / folder).rglob("*.py") if is_test(test)]
    if file.suffix == ".py":
        found |= {str(test.relative_to(ROOT)) for test in tests if uses.search(test.read_text(encoding="utf-8"))}
    for stem in (file.stem.strip("_"), file.parent.name):
        if file.parts[0] != "tests" and (stem != file.parent.name or not found):
            named = re.compile(rf"(^|_){re.escape(stem)}(_|\.)")
            found |= {str(test.relative_to(ROOT)) for test in tests if stem and named.search(test.name)}
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


def is_test(file: Path) -> bool:
    """Whether pytest collects the file."""
    return file.suffix == ".py" and (file.name.startswith("test_") or file.name.endswith("_test.py"))


if __name__ == "__main__":
    sys.exit(main())
