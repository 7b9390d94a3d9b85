# SPDX-License-Identifier: Apache-2.0
"""Finds an mlir-opt, which the tests parse the emitted MLIR with; where there is none, gets Debian's or Ubuntu's.

No root is needed: apt downloads what is not installed into build/mlir-opt/, and it is unpacked there. Where there is no
apt, or no network, the reason is written down there, and the tests that need mlir-opt are skipped with it.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent.parent / "build" / "mlir-opt"
SYSTEM = Path("/usr/lib")
OURS, REASON = FOLDER / "mlir-opt", FOLDER / "reason"
OLDEST = 17  # LLVM's release that reads properties, `<{...}>`
SECONDS = 600


class NoMlirOptError(RuntimeError):
    """Why there is none."""


def find() -> str | None:
    """An mlir-opt that is new enough: of PATH, of Debian's folders, or the one that was fetched; the newest first."""
    names = ["mlir-opt", *(f"mlir-opt-{version}" for version in range(40, OLDEST - 1, -1))]
    folders = sorted(SYSTEM.glob("llvm-*/bin/mlir-opt"), key=lambda path: path.parts[3], reverse=True)
    found = [shutil.which(name) for name in names] + [str(path) for path in (*folders, OURS) if path.is_file()]
    return next((path for path in found if path and version_of(path) >= OLDEST), None)


def reason() -> str:
    """What to say where `find` finds none."""
    if REASON.is_file():
        return REASON.read_text(encoding="utf-8")
    return "there is no mlir-opt of LLVM 17 or newer: python scripts/mlir_opt.py gets Debian's"


def version_of(path: str) -> int:
    """LLVM's release of an mlir-opt; 0 if it does not run."""
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, check=False, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    match = re.search(r"LLVM version (\d+)", done.stdout)
    return int(match[1]) if match and done.returncode == 0 else 0


def fetch() -> None:
    """Gets the newest release that apt knows, with the libraries that are not installed.

    Raises:
        NoMlirOptError: that cannot be done here; the message says why.
    """
    for tool in ("apt-get", "apt-cache", "dpkg-deb", "dpkg-query"):
        if shutil.which(tool) is None:
            raise NoMlirOptError(f"mlir-opt is not installed, and this machine has no {tool} to get Debian's with")
    shutil.rmtree(FOLDER, ignore_errors=True)
    for folder in ("lists/partial", "cache/archives/partial", "packages"):
        (FOLDER / folder).mkdir(parents=True)
    run("apt-get", "update", "-q")
    listed = run("apt-cache", "search", "--names-only", r"^mlir-[0-9]+-tools$")
    releases = sorted((int(number) for number in re.findall(r"^mlir-(\d+)-tools", listed, re.MULTILINE)), reverse=True)
    if not releases or releases[0] < OLDEST:
        raise NoMlirOptError(f"mlir-opt is not installed, and apt knows none of LLVM {OLDEST} or newer")
    # Not apt-get install: that wants a system whose packages are all in order.
    run("apt-get", "download", "-q", *missing_packages(f"mlir-{releases[0]}-tools"))
    for package in sorted((FOLDER / "packages").glob("*.deb")):
        run("dpkg-deb", "-x", str(package), str(FOLDER / "root"))
    for program in (FOLDER / "root" / "usr" / "lib" / f"llvm-{releases[0]}" / "bin").iterdir():
        if program.name != "mlir-opt":  # ten more, of which none is small
            program.unlink()
    write_wrapper(releases[0])
    for folder in ("cache", "lists", "packages"):
        shutil.rmtree(FOLDER / folder)
    if version_of(str(OURS)) != releases[0]:
        raise NoMlirOptError(f"Debian's mlir-opt of LLVM {releases[0]} was unpacked, and does not run here")


def missing_packages(name: str) -> list[str]:
    """A package and all that it depends on, but for what is installed."""
    no = [f"--no-{kind}" for kind in ("recommends", "suggests", "conflicts", "breaks", "replaces", "enhances")]
    needed = run("apt-cache", "depends", "--recurse", *no, name)
    names = set(re.findall(r"^([a-z0-9][a-z0-9+.-]*)$", needed, re.MULTILINE))
    installed = run("dpkg-query", "-W", "-f", "${Package} ${db:Status-Status}\\n")
    return sorted(names - set(re.findall(r"^(\S+) installed$", installed, re.MULTILINE)))


def run(*command: str) -> str:
    """What a command says; apt keeps its state in our folder, and packages are downloaded there.

    Raises:
        NoMlirOptError: it fails; the message has its last line.
    """
    settings = FOLDER / "apt.conf"
    # Without root no lock can be taken and no other user be become; lists and archives are ours.
    settings.write_text(
        f'Dir::State::lists "{FOLDER}/lists";\nDir::Cache "{FOLDER}/cache";\n'
        'Debug::NoLocking "true";\nAPT::Sandbox::User "root";\n'
        'Acquire::http::Timeout "20";\nAcquire::https::Timeout "20";\nAcquire::Retries "1";\n',
        encoding="utf-8",
    )
    environment = os.environ | {"APT_CONFIG": str(settings), "LC_ALL": "C", "DEBIAN_FRONTEND": "noninteractive"}
    try:
        done = subprocess.run(
            command,
            cwd=FOLDER / "packages",
            env=environment,
            check=False,
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoMlirOptError(f"mlir-opt is not installed, and getting Debian's failed: {error}") from error
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip() or "no message").splitlines()[-1]
        raise NoMlirOptError(f"mlir-opt is not installed, and getting Debian's failed: {' '.join(command[:2])}: {last}")
    return done.stdout


def write_wrapper(release: int) -> None:
    """A script that runs the unpacked mlir-opt with the libraries beside it."""
    root = FOLDER / "root"
    libraries = [path for path in (*root.glob("usr/lib/*-linux-gnu*"), *root.glob("lib/*-linux-gnu*")) if path.is_dir()]
    libraries.append(root / "usr" / "lib" / f"llvm-{release}" / "lib")
    search = ":".join(map(str, libraries))
    OURS.write_text(
        f'#!/bin/sh\nLD_LIBRARY_PATH="{search}" exec "{root}/usr/lib/llvm-{release}/bin/mlir-opt" "$@"\n',
        encoding="utf-8",
    )
    OURS.chmod(0o755)


def main() -> None:
    """Makes sure of an mlir-opt, or says why there is none; never fails, for the tests run without it too."""
    if find() is None:
        sys.stdout.write("Getting Debian's mlir-opt, for the tests of the emitted MLIR: about 70 MB, once\n")
        try:
            fetch()
        except NoMlirOptError as error:
            FOLDER.mkdir(parents=True, exist_ok=True)
            REASON.write_text(str(error), encoding="utf-8")
            sys.stdout.write(f"{error}. The tests that need it are skipped\n")
            return
    sys.stdout.write(f"mlir-opt: {find()}\n")


if __name__ == "__main__":
    main()
