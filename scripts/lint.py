# SPDX-License-Identifier: Apache-2.0
"""Every check of style and types, at a desk and in CI alike: licences, ruff, mypy, clang-format, clang-tidy, docs."""

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "lint"
LICENCE = "SPDX-License-Identifier: Apache-2.0"
FOLDERS = ("aie", "benchmarks", "ep", "graph_rewrites", "ops", "python", "scripts", "tests")
SOURCES = (".cc", ".h", ".py")
# Says of each file that it is not formatted, not of each place in it.
FORMAT_CHECK = ("--dry-run", "--Werror", "--ferror-limit=1")
# A comment or docstring that leaves out what it is about: the reader has to guess it from the name below it.
RIDDLE = re.compile(r'(?://|#|"""|^ \*) *Of (?!course)', re.MULTILINE)
INCLUDE = re.compile(r'^\s*#include ["<]([^">]+)[">]', re.MULTILINE)
# One finding of clang-tidy: its line and the notes and code below it.
FINDING = re.compile(r"^/\S+ (?:error|warning): .*\n(?:(?!/\S+ (?:error|warning): |\[\d|Error while).*\n)*", re.M)


def main() -> int:
    """Runs the checks and says which failed; the exit code is 1 if one did."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fix", action="store_true", help="mend what the tools can mend by themselves")
    parser.add_argument(
        "--changed",
        metavar="BASE",
        nargs="?",
        const="main",
        help="run what takes long (mypy, clang-tidy, the site) only on what differs from BASE [main]",
    )
    arguments = parser.parse_args()
    BUILD.mkdir(parents=True, exist_ok=True)

    files = [file for folder in FOLDERS for file in sorted((ROOT / folder).rglob("*")) if file.suffix in SOURCES]
    files = [file.relative_to(ROOT) for file in files]
    cxx = [file for file in files if file.suffix in (".cc", ".h")]
    changed = set(differing(arguments.changed) if arguments.changed else files)
    units = [file for file in cxx if file.suffix == ".cc"]
    if arguments.changed:
        units = units_of(changed, units)
    checks = {
        "licence": check_licences(files),
        "comments": check_comments(files),
        "ruff check": run("ruff", "check", *(["--fix"] if arguments.fix else []), "."),
        "ruff format": run("ruff", "format", *([] if arguments.fix else ["--check"]), "."),
        "mypy": not any(file.suffix == ".py" for file in changed) or check_types(),
        "clang-format": run_on(cxx, "clang-format", *(["-i"] if arguments.fix else FORMAT_CHECK)),
        "clang-tidy": tidy(units, fix=arguments.fix, quick=bool(arguments.changed)),
        "site": not any(shown(file) for file in changed) or run("mkdocs", "build", "--strict", "--quiet"),
    }
    failed = [name for name, passed in checks.items() if not passed]
    print(f"lint: {', '.join(failed)} failed" if failed else "lint: all passed")
    return 1 if failed else 0


def differing(base: str) -> list[Path]:
    """The files that differ from a commit, and those that git does not know yet."""
    names = []
    for command in (["diff", "--name-only", base], ["ls-files", "--others", "--exclude-standard"]):
        done = subprocess.run([tool("git"), *command], cwd=ROOT, check=True, capture_output=True, text=True)
        names += done.stdout.splitlines()
    return [Path(name) for name in names]


def shown(file: Path) -> bool:
    """Whether the site shows something of a file: a page, or docstrings."""
    return file.suffix in (".md", ".yml") or file.is_relative_to("python/flownpu") or file.is_relative_to("ops")


def units_of(changed: set[Path], units: list[Path]) -> list[Path]:
    """What clang-tidy is to read: changed units, and for each changed header one that includes it."""
    found = {unit for unit in units if unit in changed}
    for header in (file for file in changed if file.suffix in (".h", ".hpp") and (ROOT / file).exists()):
        users = [unit for unit in units if ROOT / header in includes(ROOT / unit)]
        if users and not found.intersection(users):
            found.add(min(users, key=lambda unit: (unit.with_suffix(".h") != header, unit)))
    return sorted(found)


@cache
def includes(file: Path) -> frozenset[Path]:
    """The project's files that a file includes, directly or not, and itself."""
    found, ways = {file}, [file]
    while ways:
        one = ways.pop()
        for name in INCLUDE.findall(one.read_text(encoding="utf-8")):
            places = (ROOT / name, one.parent / name, ROOT / "aie" / "host" / name)
            if (place := next((place for place in places if place.is_file()), None)) and place not in found:
                found.add(place)
                ways.append(place)
    return frozenset(found)


def tool(name: str) -> str:
    """The tool of this Python's environment, activated or not."""
    path = shutil.which(name, path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if path is None:
        sys.exit(f'lint: {name} is not installed: pip install "flownpu[dev]"')
    return path


def complaints(name: str, *arguments: str, **environment: str) -> str:
    """What a tool says if it fails; nothing if it ends well."""
    done = subprocess.run(
        [tool(name), *arguments],
        cwd=ROOT,
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | environment,
    )
    return (done.stdout or f"{name} failed") if done.returncode else ""


def run(name: str, *arguments: str) -> bool:
    """Whether a tool ends well; shows what it says if not."""
    text = complaints(name, *arguments)
    print(text, end="")
    return not text


def run_on(files: list[Path], name: str, *arguments: str) -> bool:
    """Like `run`, on these files; true if there are none."""
    return not files or run(name, *arguments, *map(str, files))


def check_licences(files: list[Path]) -> bool:
    """Whether every source file says its licence in its first line."""
    missing = [file for file in files if LICENCE not in (ROOT / file).read_text(encoding="utf-8").partition("\n")[0]]
    for file in missing:
        print(f"{file}: expected '{LICENCE}' in the first line")
    return not missing


def check_comments(files: list[Path]) -> bool:
    """Whether every comment says what it is about, rather than of what something unnamed is."""
    passed = True
    for file in files:
        text = (ROOT / file).read_text(encoding="utf-8")
        for found in RIDDLE.finditer(text):
            line = text.count("\n", 0, found.start()) + 1
            print(f"{file}:{line}: expected a comment that says what this is or does, got one that begins with 'Of'")
            passed = False
    return passed


def check_types() -> bool:
    """Checks the package and the scripts with mypy; in `python/` links lead to the parts that lie elsewhere."""
    source = ROOT / "python"
    # The native module's types, which the build wrote: `make lint` installs first.
    stub = Path(sysconfig.get_path("platlib")) / "flownpu" / "_native.pyi"
    if stub.exists():
        shutil.copy(stub, source / "flownpu" / "_native.pyi")
    text = complaints("mypy", "--strict", "-p", "flownpu", MYPYPATH=str(source))
    text += complaints("mypy", "--strict", "--follow-imports=silent", "scripts", MYPYPATH=str(source))
    # A reader wants the names of the files, not of the links to them.
    for part in ("aie", "graph_rewrites", "ops"):
        text = text.replace(f"python/flownpu/{part}/", f"{part}/")
    print(text, end="")
    return not text


def tidy(files: list[Path], *, fix: bool, quick: bool) -> bool:
    """Checks translation units with clang-tidy, as many at once as there are cores; not again those that were clean.

    Kernels are compiled once for each instruction set or architecture: if `quick`, they are read for the last only, for
    which they have most.
    """
    if not files:
        return True
    settings = ("-G", "Ninja", "-DFLOWNPU_TESTING=ON", f"-DPython_EXECUTABLE={sys.executable}")
    if not run("cmake", "-S", ".", "-B", str(BUILD), *settings):
        return False
    entries = json.loads((BUILD / "compile_commands.json").read_text(encoding="utf-8"))
    entries = list({entry["file"]: entry for entry in entries}.values()) if quick else entries
    (BUILD / "tidy").mkdir(exist_ok=True)
    (BUILD / "tidy" / "compile_commands.json").write_text(json.dumps(entries), encoding="utf-8")
    commands: dict[Path, list[str]] = {}
    for entry in entries:
        commands.setdefault(Path(entry["file"]), []).append(entry["command"])
    if left_out := [str(file) for file in files if ROOT / file not in commands]:
        print(f"clang-tidy: not built on this machine, and not looked at: {', '.join(left_out)}")
    units = [ROOT / file for file in files if ROOT / file in commands]
    # Two fixes of one header at the same time would both be written.
    with ThreadPoolExecutor(1 if fix else os.cpu_count()) as pool:
        outputs = pool.map(lambda unit: tidy_unit(unit, commands[unit], fix=fix), units)
    # What is wrong with a header is said once for each file that includes it.
    found = dict.fromkeys(finding for output in outputs for finding in FINDING.findall(output))
    print("".join(found), end="")
    return not found


def tidy_unit(unit: Path, commands: list[str], *, fix: bool) -> str:
    """What clang-tidy says of a unit; nothing if it, all that it includes and the rules are those of a clean run."""
    rules = [folder / ".clang-tidy" for folder in unit.parents if folder.is_relative_to(ROOT)]
    parts = [version_of("clang-tidy"), *commands]
    parts += [file.read_text(encoding="utf-8") for file in [*rules, *sorted(includes(unit))] if file.is_file()]
    clean = BUILD / "tidy" / hashlib.sha256("\0".join(parts).encode()).hexdigest()
    if clean.exists():
        return ""
    options = ["-p", str(BUILD / "tidy"), "--quiet", "--warnings-as-errors=*", *(["--fix"] if fix else [])]
    said = complaints("clang-tidy", *options, str(unit))
    if not said:
        clean.touch()
    return said


@cache
def version_of(name: str) -> str:
    """What a tool says of its version."""
    return subprocess.run([tool(name), "--version"], check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    sys.exit(main())
