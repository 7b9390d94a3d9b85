# SPDX-License-Identifier: Apache-2.0
"""Builds what is released into dist/: sources, wheels for Linux x86-64 of glibc 2.28 or newer, their debug information.

The wheels are built from the source distribution, by this machine's g++ with an old C library (sysroot.py), and looked
at when they are built (contents.py). Two builds of a commit with one compiler have the same bytes, whatever the folder.
Run it as `python -m scripts.release.wheels`; it needs Python 3.11 for one of the wheels and a later one for the other.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
from functools import cache
from pathlib import Path

from scripts import xrt_headers
from scripts.debian_packages import UnavailableError
from scripts.release import sysroot

__all__ = ["ROOT", "build", "commit", "environment", "pythons", "tools"]

ROOT = Path(__file__).resolve().parent.parent.parent
PLATFORM = "manylinux_2_28_x86_64"
SHIMS = ROOT / "scripts" / "release" / "old_glibc.cc"
LIBRARIES = f"-L{sysroot.ROOT}/usr/lib/x86_64-linux-gnu -L{sysroot.ROOT}/lib/x86_64-linux-gnu"
# Pythons: the one that gets a wheel of its own, and those of which any builds the wheel for all since 3.12.
OWN_ABI, STABLE_ABI = "3.11", ("3.12", "3.13", "3.14")


def build(work: Path, dist: Path) -> list[Path]:
    """Builds all of it.

    Args:
        work: where it is built; kept, so that building again compiles what is new.
        dist: gets the files; older ones of FlowNPU in it are removed.

    Returns:
        The source distribution and the wheels.

    Raises:
        UnavailableError: the old C library cannot be had, or a Python is missing.
        RuntimeError: a wheel is not what it is to be.
        subprocess.CalledProcessError: a step failed; it has said why.
    """
    from scripts.release import contents  # noqa: PLC0415 what it imports is in the environment that `main` makes

    for part in (sysroot, xrt_headers):
        if part.find() is None:
            part.fetch()
    found = pythons()
    dist.mkdir(parents=True, exist_ok=True)
    for old in dist.glob("flownpu-*"):
        old.unlink()
    environments = [environment(work, python) for python in found]
    source = _source(environments[0], work, dist)
    for each in environments:
        _wheel(each, environments, work, dist)
    _debug_files(work / "cmake", dist / f"{source.name}-{PLATFORM}-debug.tar.xz")
    made = sorted([*dist.glob("flownpu-*.tar.gz"), *dist.glob("flownpu-*.whl")])
    for wheel in made:
        if wheel.suffix == ".whl" and (wrong := contents.faults(wheel)):
            raise RuntimeError(f"{wheel.name}: " + "; ".join(wrong))
    return made


def pythons() -> list[Path]:
    """The Pythons that the wheels are built with.

    Raises:
        UnavailableError: names those that are missing.
    """
    found = []
    for versions in ((OWN_ABI,), STABLE_ABI):
        python = next((path for version in versions if (path := _python(version))), None)
        if python is None:
            raise UnavailableError(
                f"expected Python {' or '.join(versions)} with its headers, found none on the path nor of pyenv: "
                "install it (Debian: python3-dev; pyenv install)"
            )
        found.append(python)
    return found


def _python(version: str) -> Path | None:
    """A Python of a version: the one on the path, or pyenv's."""
    folders = sorted((Path.home() / ".pyenv" / "versions").glob(f"{version}.*"))
    script = "import sys, sysconfig; print(sys.version_info[:2], sysconfig.get_path('include'), sep='|')"
    wanted = str(tuple(map(int, version.split("."))))
    for name in (f"python{version}", *(str(folder / "bin" / "python3") for folder in folders)):
        path = shutil.which(name)
        done = subprocess.run([path, "-c", script], check=False, capture_output=True, text=True) if path else None
        if path and done and done.returncode == 0:
            said, _, headers = done.stdout.strip().partition("|")
            if said == wanted and (Path(headers) / "Python.h").is_file():
                return Path(path)
    return None


def tools(extra: str) -> list[str]:
    """The requirements of an extra of pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return list(project["optional-dependencies"][extra])


def environment(work: Path, python: Path, extra: str = "release") -> Path:
    """An environment of a Python with what builds wheels, at pyproject.toml's versions; returns its Python."""
    wanted = tools(extra)
    version = subprocess.run([python, "-V"], check=True, capture_output=True, text=True).stdout.split()[1]
    folder = work / f"python{version}"
    installed = folder / "installed"
    if not installed.is_file() or installed.read_text(encoding="utf-8") != "\n".join(wanted):
        subprocess.run([python, "-m", "venv", "--clear", folder], check=True)
        subprocess.run([folder / "bin" / "pip", "install", "--quiet", *wanted], check=True)
        installed.write_text("\n".join(wanted), encoding="utf-8")
    return folder / "bin" / "python"


@cache
def commit() -> tuple[str, int]:
    """The commit that is built, with `-dirty` if there is more in the tree than that, and its time since 1970 in s."""
    name = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    when = ["git", "log", "-1", "--format=%ct"]
    said = [
        subprocess.run(line, cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()
        for line in (name, when)
    ]
    return said[0], int(said[1])


def _reproducible() -> dict[str, str]:
    """The environment of a build: what would write the time or this machine's habits into files is told otherwise."""
    return os.environ | {
        "SOURCE_DATE_EPOCH": os.environ.get("SOURCE_DATE_EPOCH") or str(commit()[1]),
        "LC_ALL": "C.UTF-8",
        "PYTHONHASHSEED": "0",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    }


def _source(python: Path, work: Path, dist: Path) -> Path:
    """Writes the source distribution and unpacks it; returns that folder, which is new only where files differ."""
    script = "import sys, scikit_build_core.build as b; print(b.build_sdist(sys.argv[1]))"
    said = subprocess.run(
        [python, "-c", script, dist], cwd=ROOT, env=_reproducible(), check=True, stdout=subprocess.PIPE, text=True
    )
    archive = dist / said.stdout.split()[-1]
    with tarfile.open(archive) as file:
        shutil.rmtree(work / "unpacked", ignore_errors=True)
        file.extractall(work / "unpacked", filter="data")  # keeps the times of files, all those of the commit
    (new,) = (work / "unpacked").iterdir()
    source = work / "source" / new.name
    _update(new, source)
    return source


def _update(new: Path, old: Path) -> None:
    """Makes a folder equal to another, leaving files that are equal alone: what was compiled of them still holds."""
    wanted = {file.relative_to(new) for file in new.rglob("*") if file.is_file()}
    for file in [file for file in old.rglob("*") if file.is_file() and file.relative_to(old) not in wanted]:
        file.unlink()
    for name in sorted(wanted):
        target = old / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if not target.is_file() or target.read_bytes() != (new / name).read_bytes():
            shutil.copyfile(new / name, target)


def _wheel(python: Path, pythons: list[Path], work: Path, dist: Path) -> None:
    """Builds one wheel. All are built in one folder, with the same flags: only what calls Python is compiled again."""
    (source,) = (work / "source").iterdir()
    maps = " ".join(f"-ffile-prefix-map={folder}={name}" for folder, name in _names(pythons, work, source).items())
    flags = f"--sysroot={sysroot.ROOT} -g1 {maps}"
    old_glibc = work / "old_glibc.o"
    compiler = os.environ.get("CXX", "g++")
    subprocess.run(
        [compiler, *flags.split(), "-O2", "-fPIC", "-std=c++20", "-c", SHIMS, "-o", old_glibc],
        check=True,
    )
    defines = {
        "CMAKE_CXX_COMPILER": shutil.which(compiler),
        # None, whatever the environment says: a cache of objects may give one that was compiled in another folder.
        "CMAKE_CXX_COMPILER_LAUNCHER": "",
        "CMAKE_CXX_FLAGS": flags,
        # Before glibc 2.34 threads and the loader's functions were libraries of their own.
        "CMAKE_CXX_STANDARD_LIBRARIES": f"{old_glibc} -Wl,--no-as-needed -lpthread -ldl",
        # g++ looks for libraries beside itself before it looks in the sysroot, and the machine's own are there.
        "CMAKE_MODULE_LINKER_FLAGS": LIBRARIES,
        "CMAKE_SHARED_LINKER_FLAGS": LIBRARIES,
        "FLOWNPU_COMMIT": commit()[0],
        "FLOWNPU_PLATFORM": PLATFORM,
        "FLOWNPU_XRT_INCLUDE": xrt_headers.find(),
        "FLOWNPU_UUID_LIBRARY": sysroot.ROOT / "usr/lib/x86_64-linux-gnu/libuuid.so.1",
    }
    path = f"{python.parent}{os.pathsep}{os.environ['PATH']}"
    plain = work / "plain"
    shutil.rmtree(plain, ignore_errors=True)
    settings = {f"cmake.define.{name}": value for name, value in defines.items()} | {"build-dir": work / "cmake"}
    options = [f"--config-settings={name}={value}" for name, value in settings.items()]
    subprocess.run(
        [python, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", plain, *options, source],
        env=_reproducible() | {"PATH": path},
        check=True,
    )
    (wheel,) = plain.iterdir()
    retag = [str(python), "-m", "wheel", "tags", "--platform-tag", PLATFORM, str(wheel)]
    said = subprocess.run(retag, env=_reproducible(), check=True, stdout=subprocess.PIPE, text=True)
    shutil.move(plain / said.stdout.split()[-1], dist)


def _names(pythons: list[Path], work: Path, source: Path) -> dict[Path | str, str]:
    """Folders that the compiler would write into libraries, and what it writes instead."""
    script = "import sys, sysconfig, nanobind; print(sysconfig.get_path('include'), nanobind.__path__[0], sep='|')"
    names: dict[Path | str, str] = {  # of several that fit, g++ takes the last
        ROOT: source.name,
        work / "cmake": "build",
        sysroot.ROOT: "sysroot",
        str(xrt_headers.find()): "xrt",
        source: source.name,
    }
    for python in pythons:
        said = subprocess.run([python, "-c", script], check=True, capture_output=True, text=True).stdout.strip()
        headers, _, nanobind = said.partition("|")
        names |= {nanobind: "nanobind", headers: "python"}
    return names


def _debug_files(build: Path, archive: Path) -> None:
    """Packs the debug information of libraries, as debuggers look for it: by build ID.

    Unpacked into /usr/lib/debug, or where gdb's `debug-file-directory` is set to.
    """
    folder = build / "debug"
    shutil.rmtree(folder, ignore_errors=True)
    from scripts.release import contents  # noqa: PLC0415 as above

    for library in sorted(build.glob("*.so")):
        identity = contents.build_id(library)
        file = folder / ".build-id" / identity[:2] / f"{identity[2:]}.debug"
        file.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run(["objcopy", "--only-keep-debug", library, file], check=True)

    def plain(member: tarfile.TarInfo) -> tarfile.TarInfo:
        member.uid = member.gid = 0
        member.uname = member.gname = ""
        member.mtime = commit()[1]
        return member

    with tarfile.open(archive, "w:xz") as packed:
        for path in sorted(folder.rglob("*.debug")):
            packed.add(path, path.relative_to(folder), filter=plain)


def main() -> None:
    """Builds into dist/, and says what with its size and sum."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "release" / "wheels", help="where to build")
    parser.add_argument("--dist", type=Path, default=ROOT / "dist", help="what gets the files")
    arguments = parser.parse_args()
    try:
        builder = environment(arguments.work.resolve(), pythons()[0])
        if Path(sys.prefix) != builder.parent.parent:
            again = [str(builder), "-m", "scripts.release.wheels", *sys.argv[1:]]
            sys.exit(subprocess.run(again, cwd=ROOT, check=False).returncode)
        made = build(arguments.work.resolve(), arguments.dist.resolve())
    except (UnavailableError, RuntimeError) as error:
        sys.exit(f"error: {error}")
    for file in [*made, *arguments.dist.glob("*-debug.tar.xz")]:
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        sys.stdout.write(f"{digest}  {file.stat().st_size / 2**20:5.2f} MiB  {file.name}\n")


if __name__ == "__main__":
    main()
