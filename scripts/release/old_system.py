# SPDX-License-Identifier: Apache-2.0
"""Tries a wheel in Debian 11 (glibc 2.31) without a compiler: installs it, converts a model and generates text.

Run it by hand and as root, for it makes the system (debootstrap, 1 GB) and runs commands in it (chroot):
`python -m scripts.release.old_system dist/*.whl`. It compiles Python there, because Debian 11's own is too old; with
`--python 3.12=FOLDER` it copies a Python that was built for old systems instead. The packages that FlowNPU needs are
downloaded outside of it. The text must be the one that this machine's FlowNPU generates.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

from scripts.debian_packages import Apt, UnavailableError
from scripts.release.building import ROOT, glibc_platforms
from scripts.tools import OLD_SUITE

FOLDER = ROOT / "build" / "release" / "old_system"
# Suites of Debian with the source of a version of Python; no current one has 3.12's.
SUITES = {"3.11": "bookworm", "3.13": "trixie", "3.14": "testing"}
# The versions of Python with which a wheel is tried, by the Python tag in its name.
TRIED = {"cp311": ("3.11",), "cp312": ("3.12", "3.13", "3.14")}
BUILD = ("gcc", "make", "libc6-dev", "zlib1g-dev", "libffi-dev", "libssl-dev", "libbz2-dev", "liblzma-dev")
# Names of compilers, none of which may be on the path when the wheel is installed.
COMPILERS = ("gcc", "g++", "cc", "c++", "make", "cmake")
EXTRAS = "genai,convert"
FIXTURE = "tests/fixtures/gemma3-topics"
PROMPT = 'The "for" statement is used to'


def main() -> None:
    """Tries each given wheel; the exit code is 1 if one fails or generates another text than here."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("wheels", nargs="+", type=Path, metavar="WHEEL")
    what = "a Python for glibc 2.31, which is not compiled then"
    parser.add_argument("--python", action="append", default=[], metavar="VERSION=FOLDER", help=what)
    arguments = parser.parse_args()
    given = {version: Path(folder) for version, _, folder in (pair.partition("=") for pair in arguments.python)}
    if os.geteuid() != 0:
        sys.exit("error: this needs root, for chroot")
    expected = generated(["flownpu"], ROOT / FIXTURE, FOLDER / "model")
    failed = False
    for wheel in arguments.wheels:
        for version in TRIED[wheel.name.split("-")[2]]:
            if version not in given and version not in SUITES:
                sys.stdout.write(f"{wheel.name} with Python {version}: not tried, no Debian has its source\n")
                continue
            try:
                root = system()
                python(root, version, given.get(version))
                said = tried(root, version, wheel)
                verdict = "the same text" if said == expected else f"OTHER TEXT, expected\n{expected}\ngot\n{said}"
            except (UnavailableError, subprocess.CalledProcessError) as error:
                verdict = f"FAILED: {error}"
            failed = failed or verdict != "the same text"
            sys.stdout.write(f"{wheel.name} on glibc 2.31 with Python {version}: {verdict}\n")
            sys.stdout.flush()
    sys.exit(failed)


def generated(flownpu: list[str], fixture: Path | str, model: Path | str) -> str:
    """Converts the small model with a command `flownpu`; returns the text that it generates greedily."""
    subprocess.run([*flownpu, "convert", str(fixture), str(model), "--force"], check=True, stdout=subprocess.DEVNULL)
    run = ["run", str(model), "--no-chat-template", "--prompt", PROMPT, "--max-new-tokens", "48", "--temperature", "0"]
    return subprocess.run([*flownpu, *run], check=True, stdout=subprocess.PIPE, text=True).stdout


def system() -> Path:
    """A folder with Debian 11, which is made if it is not there."""
    root = FOLDER / "root"
    if not (root / "etc" / "debian_version").is_file():
        if shutil.which("debootstrap") is None:
            raise UnavailableError("there is no debootstrap here: apt install debootstrap")
        apt = Apt(FOLDER / "apt", "Debian 11")
        apt.run("apt-get", "update", "-q")
        making = root.with_name("making")
        shutil.rmtree(making, ignore_errors=True)
        packages = f"--include={','.join(BUILD)}"
        subprocess.run(["debootstrap", "--variant=minbase", packages, OLD_SUITE, making, apt.mirror()], check=True)
        making.rename(root)
    return root


def python(root: Path, version: str, given: Path | None) -> None:
    """Compiles a Python in the system, or copies the given one; does nothing if the system has this version."""
    place = f"/opt/python{version}"
    if (root / place[1:] / "bin" / "pip3").is_file():
        return
    if given is not None:
        shutil.copytree(given, root / place[1:], symlinks=True)
        return
    apt = Apt(FOLDER / "apt", f"Python {version}")
    apt.run("apt-get", "update", "-q")
    apt.use_suite(SUITES[version], with_sources=True)
    with tarfile.open(apt.source(f"python{version}")) as archive:
        archive.extractall(root / "src", filter="tar")
    source = next(folder.name for folder in (root / "src").iterdir() if folder.name.startswith(f"Python-{version}"))
    steps = (
        f"cd /src/{source} && ./configure -q --prefix={place} --disable-test-modules && make -s -j2 && make -s install"
    )
    inside(root, "sh", "-c", f"({steps}) >/dev/null 2>&1")


def tried(root: Path, version: str, wheel: Path) -> str:
    """The text that the wheel generates in the system, in a new environment, with no compiler on the path."""
    packages = root / "packages"
    shutil.rmtree(packages, ignore_errors=True)
    packages.mkdir()
    needed = [name for extra in EXTRAS.split(",") for name in _requirements(wheel, extra)]
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--only-binary=:all:", "--python-version", version]
    platforms = [f"--platform={platform}" for platform in glibc_platforms("x86_64")]
    subprocess.run([*pip, *platforms, "--dest", packages, *needed], check=True)
    shutil.copy(wheel, packages)
    shutil.rmtree(root / "try", ignore_errors=True)
    shutil.copytree(ROOT / FIXTURE, root / "try" / "fixture")
    path = f"/try/environment/bin:/opt/python{version}/bin"
    for compiler in COMPILERS:
        if shutil.which(compiler, path=":".join(str(root / part[1:]) for part in path.split(":"))):
            raise UnavailableError(f"{compiler} is on the path: nothing would show that it is not needed")
    inside(root, f"/opt/python{version}/bin/python3", "-m", "venv", "/try/environment")
    name = f"/packages/{wheel.name}[{EXTRAS}]"
    install = ["/try/environment/bin/pip", "install", "--quiet", "--no-index", "--find-links=/packages", name]
    inside(root, *install, path=path)
    flownpu = "/try/environment/bin/flownpu"
    inside(root, flownpu, "--version", path=path)
    inside(root, flownpu, "doctor", path=path)
    # C++ exceptions must also work there: a wrong option must become an error message.
    wrong = [flownpu, "run", "/try/model", "--prompt", "x", "--option", "threads=many"]
    text = generated([*_chroot(root, path), flownpu], "/try/fixture", "/try/model")
    done = subprocess.run([*_chroot(root, path), *wrong], check=False, capture_output=True, text=True)
    if done.returncode != 1 or "threads" not in done.stderr:
        raise UnavailableError(f"expected an error that names the option threads, got: {done.stderr or done.stdout}")
    return text


def _requirements(wheel: Path, extra: str) -> list[str]:
    """The packages that a wheel requires, and those of one of its extras."""
    import zipfile  # noqa: PLC0415

    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        lines = re.findall(r"^Requires-Dist: (.*)$", archive.read(name).decode(), re.MULTILINE)
    pairs = [line.partition(";") for line in lines]
    wanted = re.compile(rf"\s*extra == ['\"]{extra}['\"]\s*")
    return [name.strip() for name, _, marker in pairs if not marker or wanted.fullmatch(marker)]


def _chroot(root: Path, path: str) -> list[str]:
    """The beginning of a command that runs another one in the system, with a /proc."""
    environment = ["env", "-i", f"PATH={path}", "HOME=/root", "LC_ALL=C.UTF-8", "ORT_DISABLE_TELEMETRY=1"]
    mount = 'mount -t proc proc "$0/proc" 2>/dev/null || mount --bind /proc "$0/proc" && exec chroot "$0" "$@"'
    # The mount ends with the last process of its namespace.
    return ["unshare", "--mount", "sh", "-c", mount, str(root), *environment]


def inside(root: Path, *command: str, path: str = "/usr/bin:/bin:/usr/sbin:/sbin") -> None:
    """Runs a command in the system."""
    subprocess.run([*_chroot(root, path), *command], check=True)


if __name__ == "__main__":
    main()
