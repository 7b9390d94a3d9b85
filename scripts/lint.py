# SPDX-License-Identifier: Apache-2.0
"""Every check of style and types, for developers and CI: licences, ruff, mypy, clang-format, clang-tidy, docs."""

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
# Reports each unformatted file once, not each place in it.
FORMAT_CHECK = ("--dry-run", "--Werror", "--ferror-limit=1")
# A comment or docstring without a subject, which a reader would have to guess from the name below it.
RIDDLE = re.compile(r'(?://|#|"""|^ \*) *Of (?!course)', re.MULTILINE)
INCLUDE = re.compile(r'^\s*#include ["<]([^">]+)[">]', re.MULTILINE)
# How many units clang-tidy reads as one; with larger groups, cores idle for longer until the last group is done.
TOGETHER = 8
JOIN_UNITS = str(ROOT / "scripts" / "join_units.py")
# One finding of clang-tidy: its line, and the notes and code below it.
FINDING = re.compile(r"^/\S+ (?:error|warning): .*\n(?:(?!/\S+ (?:error|warning): |\[\d|Error while).*\n)*", re.M)


def main() -> int:
    """Runs the checks and prints which failed; the exit code is 1 if one did."""
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
    """The files that differ from a commit, and those that git does not track."""
    names = []
    for command in (["diff", "--name-only", base], ["ls-files", "--others", "--exclude-standard"]):
        done = subprocess.run([tool("git"), *command], cwd=ROOT, check=True, capture_output=True, text=True)
        names += done.stdout.splitlines()
    return [Path(name) for name in names]


def shown(file: Path) -> bool:
    """Whether the site shows something of a file: a page, or docstrings."""
    return file.suffix in (".md", ".yml") or file.is_relative_to("python/flownpu") or file.is_relative_to("ops")


def units_of(changed: set[Path], units: list[Path]) -> list[Path]:
    """The units for clang-tidy: changed ones, and for each changed header one that includes it."""
    found = {unit for unit in units if unit in changed}
    for header in (file for file in changed if file.suffix in (".h", ".hpp") and (ROOT / file).exists()):
        users = [unit for unit in units if ROOT / header in includes(ROOT / unit)]
        if users and not found.intersection(users):
            found.add(min(users, key=lambda unit: (unit.with_suffix(".h") != header, unit)))
    return sorted(found)


@cache
def includes(file: Path) -> frozenset[Path]:
    """A file and all of the project's files that it includes, directly or indirectly."""
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
    """The path of a tool: in this Python's environment, even if it is not activated, or on PATH."""
    path = shutil.which(name, path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if path is None:
        sys.exit(f'lint: {name} is not installed: pip install "flownpu[dev]"')
    return path


def complaints(name: str, *arguments: str, **environment: str) -> str:
    """The output of a tool if it fails; "" if it succeeds."""
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
    """Whether a tool succeeds; prints its output if not."""
    text = complaints(name, *arguments)
    print(text, end="")
    return not text


def run_on(files: list[Path], name: str, *arguments: str) -> bool:
    """Like `run`, with these files as arguments; True if there are none."""
    return not files or run(name, *arguments, *map(str, files))


def check_licences(files: list[Path]) -> bool:
    """Whether every source file names its licence in its first line."""
    missing = [file for file in files if LICENCE not in (ROOT / file).read_text(encoding="utf-8").partition("\n")[0]]
    for file in missing:
        print(f"{file}: expected '{LICENCE}' in the first line")
    return not missing


def check_comments(files: list[Path]) -> bool:
    """Whether every comment has a subject, rather than beginning with "Of"."""
    passed = True
    for file in files:
        text = (ROOT / file).read_text(encoding="utf-8")
        for found in RIDDLE.finditer(text):
            line = text.count("\n", 0, found.start()) + 1
            print(f"{file}:{line}: expected a comment that says what this is or does, got one that begins with 'Of'")
            passed = False
    return passed


def check_types() -> bool:
    """Checks the package and the scripts with mypy; in `python/` there are links to the parts that are elsewhere."""
    source = ROOT / "python"
    # The native module's types, which the build has written: `make lint` installs the package first.
    stub = Path(sysconfig.get_path("platlib")) / "flownpu" / "_native.pyi"
    if stub.exists():
        shutil.copy(stub, source / "flownpu" / "_native.pyi")
    text = complaints("mypy", "--strict", "-p", "flownpu", MYPYPATH=str(source))
    text += complaints("mypy", "--strict", "--follow-imports=silent", "scripts", MYPYPATH=str(source))
    # Prints the files' own names, not those of the links to them.
    for part in ("aie", "graph_rewrites", "ops"):
        text = text.replace(f"python/flownpu/{part}/", f"{part}/")
    print(text, end="")
    return not text


def tidy(files: list[Path], *, fix: bool, quick: bool) -> bool:
    """Checks translation units with clang-tidy, one group per core at a time; skips those that are known to be clean.

    Kernels are compiled once for each instruction set or architecture: if `quick`, they are read for the last only, for
    which they have most code. If not, units that are compiled with the same options are joined and read as one.
    """
    if not files:
        return True
    settings = ("-G", "Ninja", "-DFLOWNPU_TESTING=ON", f"-DPython_EXECUTABLE={sys.executable}")
    if not run("cmake", "-S", ".", "-B", str(BUILD), *settings):
        return False
    entries = json.loads((BUILD / "compile_commands.json").read_text(encoding="utf-8"))
    entries = list({entry["file"]: entry for entry in entries}.values()) if quick else entries
    commands: dict[Path, list[str]] = {}
    for entry in entries:
        commands.setdefault(Path(entry["file"]), []).append(entry["command"])
    if left_out := [str(file) for file in files if ROOT / file not in commands]:
        print(f"clang-tidy: not built on this machine, and not looked at: {', '.join(left_out)}")
    (BUILD / "tidy").mkdir(exist_ok=True)
    units = [ROOT / file for file in files if ROOT / file in commands]
    units = [unit for unit in units if not clean_mark(unit, commands[unit]).exists()]
    groups = [[unit] for unit in units] if fix or quick else alike(units, commands)
    for number, group in enumerate(groups):
        if len(group) > 1:
            joined = write_joined(group, number)
            own = [command.replace(str(group[0]), str(joined)) for command in commands[group[0]]]
            entries += [{"directory": str(BUILD), "file": str(joined), "command": command} for command in own]
    (BUILD / "tidy" / "compile_commands.json").write_text(json.dumps(entries), encoding="utf-8")
    # One at a time if it fixes: two processes might both write a fix into one header.
    with ThreadPoolExecutor(1 if fix else os.cpu_count()) as pool:
        outputs = pool.map(lambda *group: tidy_group(*group, commands=commands, fix=fix), range(len(groups)), groups)
    # A finding in a header is reported for each unit that includes it; it is printed once.
    found = dict.fromkeys(finding for output in outputs for finding in FINDING.findall(output))
    print("".join(found), end="")
    return not found


def alike(units: list[Path], commands: dict[Path, list[str]]) -> list[list[Path]]:
    """Groups of units that can be joined: same options, same rules, no name in common."""
    found: dict[tuple[str, ...], list[Path]] = {}
    for unit in units:
        own = str(unit.relative_to(ROOT))
        key = (*(command.replace(own, "") for command in commands[unit]), *map(str, rules_of(unit)))
        found.setdefault(key, []).append(unit)
    groups = []
    for own_kind in found.values():
        command = [sys.executable, JOIN_UNITS, "--most", str(TOGETHER), *map(str, own_kind)]
        done = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
        groups += [[Path(unit) for unit in line.split()] for line in done.stdout.splitlines()]
    return groups


def joined_file(group: list[Path], number: int) -> Path:
    """The path of a file that joins units; its folder is below a copy of their rules."""
    folder = rules_of(group[0])[0].parent.relative_to(ROOT)
    return BUILD / "tidy" / "joined" / folder / f"{number}.cc"


def write_joined(group: list[Path], number: int) -> Path:
    """Writes units as one file, with #line for each line's origin; units that are #included would count as headers."""
    joined = joined_file(group, number)
    joined.parent.mkdir(parents=True, exist_ok=True)
    joined.write_text(
        "".join(f'#line 1 "{unit}"\n{unit.read_text(encoding="utf-8")}' for unit in group), encoding="utf-8"
    )
    for rules in rules_of(group[0])[:-1]:  # the last one, the repository's, is above this folder, too
        shutil.copy(rules, BUILD / "tidy" / "joined" / rules.relative_to(ROOT))
    return joined


def tidy_group(number: int, group: list[Path], *, commands: dict[Path, list[str]], fix: bool) -> str:
    """Findings of clang-tidy in units: none if it finds none in the joined file, else those of each unit by itself."""
    options = ("-p", str(BUILD / "tidy"), "--quiet", "--warnings-as-errors=*")
    if len(group) > 1 and not complaints("clang-tidy", *options, str(joined_file(group, number))):
        for unit in group:
            clean_mark(unit, commands[unit]).touch()
    return "".join(tidy_unit(unit, commands[unit], fix=fix) for unit in group)


def tidy_unit(unit: Path, commands: list[str], *, fix: bool) -> str:
    """Findings of clang-tidy in a unit; none, without running it, if nothing has changed since a clean run."""
    clean = clean_mark(unit, commands)
    if clean.exists():
        return ""
    options = ["-p", str(BUILD / "tidy"), "--quiet", "--warnings-as-errors=*", *(["--fix"] if fix else [])]
    said = complaints("clang-tidy", *options, str(unit))
    if not said:
        clean.touch()
    return said


def clean_mark(unit: Path, commands: list[str]) -> Path:
    """A file that exists if the unit was clean with the same text, includes, commands, rules and clang-tidy."""
    parts = [version_of("clang-tidy"), *commands]
    parts += [file.read_text(encoding="utf-8") for file in [*rules_of(unit), *sorted(includes(unit))]]
    return BUILD / "tidy" / hashlib.sha256("\0".join(parts).encode()).hexdigest()


def rules_of(unit: Path) -> list[Path]:
    """The files with clang-tidy's rules for a unit, the nearest first."""
    rules = [folder / ".clang-tidy" for folder in unit.parents if folder.is_relative_to(ROOT)]
    return [file for file in rules if file.is_file()]


@cache
def version_of(name: str) -> str:
    """The output of a tool's --version."""
    return subprocess.run([tool(name), "--version"], check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    sys.exit(main())
