# SPDX-License-Identifier: Apache-2.0
"""Builds a release into dist/: sources, wheels for Linux with glibc 2.28 or newer, their debug information.

The wheels are built from the source distribution: those for x86-64 by this machine's g++ with an old C library, those
for Arm by Zig's clang (aarch64.py). Their contents are checked (contents.py). Two builds of a commit with the same
compiler have the same bytes, whatever the folder. Run it as `python -m scripts.release.wheels`; it needs Python 3.11
for one of the wheels and a later one for the other.
"""

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

from scripts import tools
from scripts.debian_packages import UnavailableError
from scripts.release import aarch64
from scripts.release.building import ROOT, commit, environment, pip_wheel, prefix_maps, pythons, reproducible
from scripts.release.zig import Zig

PLATFORM = "manylinux_2_28_x86_64"
SHIMS = ROOT / "scripts" / "release" / "old_glibc.cc"
# Debian 11's glibc 2.31. The machine's own g++ compiles with it, so that a wheel has the kernels that were tested here;
# only the libraries to which they are linked are older. old_glibc.cc has the functions of a newer glibc that g++'s C++
# run-time library needs, and contents.py refuses wheels with symbols newer than 2.28.
SYSROOT = tools.folder_of("glibc") / "root"
LIBRARIES = f"-L{SYSROOT}/usr/lib/x86_64-linux-gnu -L{SYSROOT}/lib/x86_64-linux-gnu"
# Extras of pyproject.toml with the build requirements.
EXTRAS = ("release", "zig")


def build(work: Path, dist: Path) -> list[Path]:
    """Builds all files of a release.

    Args:
        work: the build folder; it is kept, so that another build compiles only what has changed.
        dist: gets the files; older ones of FlowNPU in it are removed.

    Returns:
        The source distribution and the wheels.

    Raises:
        UnavailableError: the old C library cannot be had, or a Python or Arm's binutils are missing.
        RuntimeError: something is wrong with a wheel.
        subprocess.CalledProcessError: a step failed; it has printed why.
    """
    from scripts.release import contents  # noqa: PLC0415 what it imports is in the environment that `main` makes

    for name in ("glibc", "xrt-headers"):
        tools.fetch(name)
        if tools.find(name) is None:
            raise UnavailableError(tools.reason(name))
    objcopy = aarch64.find_objcopy()
    found = pythons()
    dist.mkdir(parents=True, exist_ok=True)
    for old in dist.glob("flownpu-*"):
        old.unlink()
    environments = [environment(work, python, *EXTRAS) for python in found]
    source = _source(environments[0], work, dist)
    # All wheels of a processor are built in one folder with the same flags, so that only code that calls Python is
    # compiled again.
    for each in environments:
        _wheel(each, environments, work, dist)
    _debug_files(work / "cmake", dist / f"{source.name}-{PLATFORM}-debug.tar.xz", "objcopy")
    zig = Zig.of(environments[0], work, aarch64.TARGET)
    for each in reversed(environments):  # 3.11 comes last, because emulated.py uses the files of its build
        aarch64.build_wheel(each, environments, source, zig, work, dist)
    _debug_files(work / aarch64.FOLDER, dist / f"{source.name}-{aarch64.PLATFORM}-debug.tar.xz", objcopy)
    made = sorted([*dist.glob("flownpu-*.tar.gz"), *dist.glob("flownpu-*.whl")])
    for wheel in made:
        if wheel.suffix == ".whl" and (wrong := contents.faults(wheel)):
            raise RuntimeError(f"{wheel.name}: " + "; ".join(wrong))
    return made


def _source(python: Path, work: Path, dist: Path) -> Path:
    """Writes the source distribution and unpacks it; returns its folder, in which only files that differ are new."""
    script = "import sys, scikit_build_core.build as b; print(b.build_sdist(sys.argv[1]))"
    said = subprocess.run(
        [python, "-c", script, dist], cwd=ROOT, env=reproducible(), check=True, stdout=subprocess.PIPE, text=True
    )
    archive = dist / said.stdout.split()[-1]
    with tarfile.open(archive) as file:
        shutil.rmtree(work / "unpacked", ignore_errors=True)
        file.extractall(work / "unpacked", filter="data")  # keeps the times of files, which are all the commit's
    (new,) = (work / "unpacked").iterdir()
    source = work / "source" / new.name
    _update(new, source)
    return source


def _update(new: Path, old: Path) -> None:
    """Makes the folder `old` equal to `new`; equal files stay untouched, so that they are not compiled again."""
    wanted = {file.relative_to(new) for file in new.rglob("*") if file.is_file()}
    for file in [file for file in old.rglob("*") if file.is_file() and file.relative_to(old) not in wanted]:
        file.unlink()
    for name in sorted(wanted):
        target = old / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if not target.is_file() or target.read_bytes() != (new / name).read_bytes():
            shutil.copyfile(new / name, target)


def _wheel(python: Path, pythons: list[Path], work: Path, dist: Path) -> None:
    """Builds one wheel for x86-64."""
    (source,) = (work / "source").iterdir()
    # g++ writes the target of a link to system headers.
    xrt = (tools.folder_of("xrt-headers") / "root/usr/include").resolve()
    folders: dict[Path | str, str] = {  # if several match, g++ uses the last one
        ROOT: source.name,
        work / "cmake": "build",
        SYSROOT: "sysroot",
        xrt: "xrt",
        source: source.name,
    }
    flags = f"--sysroot={SYSROOT} -g1 {prefix_maps(folders, pythons)}"
    # Named by its contents, so that libraries are linked again when it changes.
    old_glibc = work / f"old_glibc-{hashlib.sha256(SHIMS.read_bytes()).hexdigest()[:12]}.o"
    compiler = os.environ.get("CXX", "g++")
    subprocess.run([compiler, *flags.split(), "-O2", "-fPIC", "-std=c++20", "-c", SHIMS, "-o", old_glibc], check=True)
    defines: dict[str, object] = {
        "CMAKE_CXX_COMPILER": shutil.which(compiler),
        # No launcher, even if the environment asks for one: a compiler cache may return objects from another folder.
        "CMAKE_CXX_COMPILER_LAUNCHER": "",
        "CMAKE_CXX_FLAGS": flags,
        # Before glibc 2.34, threads and the loader's functions are in separate libraries.
        "CMAKE_CXX_STANDARD_LIBRARIES": f"{old_glibc} -Wl,--no-as-needed -lpthread -ldl",
        # g++ searches libraries beside itself before the sysroot, and the machine's own are there.
        "CMAKE_MODULE_LINKER_FLAGS": LIBRARIES,
        "CMAKE_SHARED_LINKER_FLAGS": LIBRARIES,
        "FLOWNPU_COMMIT": commit()[0],
        "FLOWNPU_PLATFORM": PLATFORM,
        "FLOWNPU_XRT_INCLUDE": xrt,
        "FLOWNPU_UUID_LIBRARY": SYSROOT / "usr/lib/x86_64-linux-gnu/libuuid.so.1",
    }
    pip_wheel(python, source, work / "cmake", dist, platform=PLATFORM, defines=defines)


def _debug_files(build: Path, archive: Path, objcopy: str) -> None:
    """Packs the debug information of libraries into files named by build ID, as debuggers look for them.

    The archive is to be unpacked into /usr/lib/debug, or into gdb's `debug-file-directory`. `objcopy` is that of the
    libraries' processor.
    """
    folder = build / "debug"
    shutil.rmtree(folder, ignore_errors=True)
    from scripts.release import contents  # noqa: PLC0415 as above

    for library in sorted(file for file in build.glob("*.so") if file.name.split(".")[0] in contents.LIBRARIES):
        identity = contents.build_id(library)
        file = folder / ".build-id" / identity[:2] / f"{identity[2:]}.debug"
        file.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run([objcopy, "--only-keep-debug", library, file], check=True)

    def plain(member: tarfile.TarInfo) -> tarfile.TarInfo:
        member.uid = member.gid = 0
        member.uname = member.gname = ""
        member.mtime = commit()[1]
        return member

    with tarfile.open(archive, "w:xz") as packed:
        for path in sorted(folder.rglob("*.debug")):
            packed.add(path, path.relative_to(folder), filter=plain)


def main() -> None:
    """Builds into dist/, and prints each file with its size and SHA-256."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "release" / "wheels", help="where to build")
    parser.add_argument("--dist", type=Path, default=ROOT / "dist", help="what gets the files")
    arguments = parser.parse_args()
    try:
        builder = environment(arguments.work.resolve(), pythons()[0], *EXTRAS)
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
