# SPDX-License-Identifier: Apache-2.0
"""Parts that the builds of all wheels share: Pythons, their environments, the commit, and pip."""

import os
import shutil
import subprocess
import tomllib
from functools import cache
from pathlib import Path

from scripts.debian_packages import UnavailableError

ROOT = Path(__file__).resolve().parent.parent.parent
# Versions of Python: the one with a separate wheel, and those of which any can build the wheel for 3.12 and later.
OWN_ABI, STABLE_ABI = "3.11", ("3.12", "3.13", "3.14")


def pythons() -> list[Path]:
    """The Pythons with which the wheels are built.

    Raises:
        UnavailableError: one is missing; the message names its versions.
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
    """A Python of a version, with its headers: the one on the path, or pyenv's; None if there is none."""
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


def tools(*extras: str) -> list[str]:
    """The requirements of extras of pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return [name for extra in extras for name in project["optional-dependencies"][extra]]


def environment(work: Path, python: Path, *extras: str) -> Path:
    """Makes an environment of a Python with extras of pyproject.toml, unless it is there; returns its interpreter."""
    wanted = tools(*extras)
    version = subprocess.run([python, "-V"], check=True, capture_output=True, text=True).stdout.split()[1]
    folder = work / f"python{version}"
    installed = folder / "installed"
    if not installed.is_file() or installed.read_text(encoding="utf-8") != "\n".join(wanted):
        subprocess.run([python, "-m", "venv", "--clear", folder], check=True)
        subprocess.run([folder / "bin" / "pip", "install", "--quiet", *wanted], check=True)
        installed.write_text("\n".join(wanted), encoding="utf-8")
    return folder / "bin" / "python"


def glibc_platforms(machine: str) -> list[str]:
    """The tags, for pip, of all platforms that a system with glibc 2.28 supports; `machine` is "x86_64", say."""
    names = [f"manylinux_2_{minor}" for minor in (28, 27, 26, 24, 17, 12, 5)]
    return [f"{name}_{machine}" for name in (*names, "manylinux2014", "manylinux2010", "manylinux1")]


@cache
def commit() -> tuple[str, int]:
    """The commit that is built, with `-dirty` if the tree has other changes, and its time in seconds since 1970."""
    name = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    when = ["git", "log", "-1", "--format=%ct"]
    said = [
        subprocess.run(line, cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()
        for line in (name, when)
    ]
    return said[0], int(said[1])


def reproducible() -> dict[str, str]:
    """Environment variables of a build that keep times and this machine's settings out of the written files."""
    return os.environ | {
        "SOURCE_DATE_EPOCH": os.environ.get("SOURCE_DATE_EPOCH") or str(commit()[1]),
        "LC_ALL": "C.UTF-8",
        "PYTHONHASHSEED": "0",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    }


def prefix_maps(folders: dict[Path | str, str], pythons: list[Path]) -> str:
    """The compiler's options that keep the names of folders out of its output.

    Args:
        folders: folders that are not Python's, and what is written instead.
        pythons: Pythons whose folders of headers and of nanobind are replaced; all of them, so that the flags are the
            same for all wheels.
    """
    script = "import sys, sysconfig, nanobind; print(sysconfig.get_path('include'), nanobind.__path__[0], sep='|')"
    names = dict(folders)
    for python in pythons:
        said = subprocess.run([python, "-c", script], check=True, capture_output=True, text=True).stdout.strip()
        headers, _, nanobind = said.partition("|")
        names |= {nanobind: "nanobind", headers: "python"}
    return " ".join(f"-ffile-prefix-map={folder}={name}" for folder, name in names.items())


def forget_python(build: Path) -> None:
    """Makes CMake search for Python again in a build folder of another Python, and keeps the compiled files.

    Otherwise CMake would use cached facts of the other Python. scikit-build-core removes all compiled files if its
    notes name another environment, but not without notes.
    """
    for name in ("CMakeCache.txt", ".skbuild-info.json"):
        (build / name).unlink(missing_ok=True)


def pip_wheel(
    python: Path, source: Path, build: Path, dist: Path, *, platform: str, defines: dict[str, object], **variables: str
) -> Path:
    """Builds the wheel of a folder of sources.

    Args:
        python: the Python that builds it, in an environment with all build requirements.
        source: the folder.
        build: CMake's folder; what was compiled in it for another Python is used again.
        dist: gets the wheel.
        platform: the wheel's platform tag, "manylinux_2_28_x86_64".
        defines: CMake's variables.
        variables: environment variables, beside those that make builds reproducible.

    Returns:
        The wheel.

    Raises:
        subprocess.CalledProcessError: a step failed; it has printed why.
    """
    plain = build.with_name(f"{build.name}-wheel")
    shutil.rmtree(plain, ignore_errors=True)
    forget_python(build)
    settings = {f"cmake.define.{name}": value for name, value in defines.items()} | {"build-dir": build}
    options = [f"--config-settings={name}={value}" for name, value in settings.items()]
    path = f"{python.parent}{os.pathsep}{os.environ['PATH']}"
    environment = reproducible() | {"PATH": path} | variables
    command = [str(python), "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--wheel-dir", str(plain), *options, str(source)], env=environment, check=True)
    (wheel,) = plain.iterdir()
    retag = [str(python), "-m", "wheel", "tags", "--platform-tag", platform, str(wheel)]
    said = subprocess.run(retag, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout
    dist.mkdir(parents=True, exist_ok=True)
    return Path(shutil.move(plain / said.split()[-1], dist / said.split()[-1]))
