# SPDX-License-Identifier: Apache-2.0
"""Builds the provider's library for Windows x64 into dist/windows/, and has it generate under Wine.

The compiler is clang as Zig brings it (windows.cmake), from PyPI. The test runs tests/windows/generate.cc with the
`onnxruntime.dll` and `onnxruntime-genai.dll` of Microsoft's wheels, at the versions of pyproject.toml, and compares its
tokens with those that ORT GenAI generates with the library of this system, for each instruction set that this
processor has. Run it as `python -m scripts.release.windows MODEL`; MODEL is a folder that `flownpu convert` made.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import onnxruntime_genai as genai

import flownpu
from flownpu.machine import describe_machine
from scripts.release.wheels import ROOT, commit

__all__ = ["build", "main"]

WORK = ROOT / "build" / "release" / "windows"
DIST = ROOT / "dist" / "windows"
LIBRARIES = ("flownpu_ep.dll", "flownpu_aie_xdna.dll", "flownpu_aie_xdna2.dll")
# The test's program, and what Wine 8 lacks of it.
PROGRAM = ("generate.exe", "bcryptprimitives.dll")
# Microsoft's packages of which the libraries are taken, and the C++ run time that those are made for: Wine 8's own
# knows a std::mutex of another form, and waits for ever.
RUNTIMES = ("onnxruntime", "onnxruntime-genai")
REDISTRIBUTABLE = "msvc-runtime==14.51.36231"
RUN_TIME = ("msvcp140", "msvcp140_1", "msvcp140_atomic_wait", "vcruntime140", "vcruntime140_1")
# The wheels' Python: any that both have wheels for, since nothing of Python is run.
WHEELS = ("--platform", "win_amd64", "--python-version", "3.12", "--only-binary=:all:", "--no-deps")
# A prompt that is computed at once, and one of more tokens than a product has rows at a time.
PROMPTS = ('The "for" statement is used to', "A list is a sequence of objects. " * 12)
TOKENS = 32
SECONDS = 600  # at most, for one run


def extra(name: str) -> dict[str, str]:
    """The requirements of an extra of pyproject.toml that are pinned, by name."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    pairs = (line.partition("==") for line in project["optional-dependencies"][name])
    return {package: version for package, equals, version in pairs if equals}


def build(work: Path, dist: Path) -> list[Path]:
    """Builds the libraries, and the test's program beside them in `work`.

    Returns:
        The libraries, in `dist`.

    Raises:
        subprocess.CalledProcessError: a step failed; it has said why.
    """
    tools = [f"{package}=={version}" for package, version in extra("windows").items()]
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", *tools], check=True)
    find = "import ziglang, pathlib; print(pathlib.Path(ziglang.__file__).with_name('zig'))"
    zig = subprocess.run([sys.executable, "-c", find], check=True, capture_output=True, text=True).stdout.strip()
    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    caches = {"ZIG_GLOBAL_CACHE_DIR": str(work / "zig"), "ZIG_LOCAL_CACHE_DIR": str(work / "zig")}
    archiver = work / "zig-ar"
    work.mkdir(parents=True, exist_ok=True)
    archiver.write_text(f'#!/bin/sh\nexec "{zig}" ar "$@"\n', encoding="utf-8")
    archiver.chmod(0o755)
    environment = os.environ | caches | {"ZIG": zig, "ZIG_AR": str(archiver), "PATH": programs}
    environment.pop("CMAKE_CXX_COMPILER_LAUNCHER", None)
    defines = {
        "CMAKE_TOOLCHAIN_FILE": ROOT / "scripts" / "release" / "windows.cmake",
        "FLOWNPU_COMMIT": commit()[0],
        "FLOWNPU_PLATFORM": "win_amd64",
        "FLOWNPU_PYTHON": "OFF",
        "FLOWNPU_TESTING": "ON",
        "FLOWNPU_WERROR": "ON",
    }
    folder = work / "cmake"
    options = [f"-D{name}={value}" for name, value in defines.items()]
    subprocess.run(["cmake", "-S", ROOT, "-B", folder, "-G", "Ninja", *options], env=environment, check=True)
    subprocess.run(["cmake", "--build", folder], env=environment, check=True)
    dist.mkdir(parents=True, exist_ok=True)
    return [Path(shutil.copy(folder / name, dist)) for name in LIBRARIES]


def runtimes(work: Path) -> list[Path]:
    """Microsoft's libraries, unpacked from the wheels for Windows."""
    pinned = extra("test")
    wanted = [*(f"{name}=={pinned[name]}" for name in RUNTIMES), REDISTRIBUTABLE]
    wheels = work / "wheels"
    command = [sys.executable, "-m", "pip", "download", "--quiet", *WHEELS, "--dest", str(wheels), *wanted]
    subprocess.run(command, check=True)
    found = []
    for wheel in wheels.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            for name in (name for name in archive.namelist() if name.endswith(".dll")):
                found.append(work / "runtimes" / Path(name).name)
                found[-1].parent.mkdir(parents=True, exist_ok=True)
                found[-1].write_bytes(archive.read(name))
    return found


class Wine:
    """Runs the test's program."""

    def __init__(self, wine: str, work: Path, libraries: list[Path]):
        self._wine = wine
        self._folder = work / "run"
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(parents=True)
        for file in [*libraries, *(work / "cmake" / name for name in PROGRAM)]:
            shutil.copy(file, self._folder)
        self._environment = os.environ | {
            "WINEPREFIX": str(work / "prefix"),
            "WINEDEBUG": "-all",
            # Microsoft's C++ run time, not Wine's; and no questions about .NET and a browser.
            "WINEDLLOVERRIDES": f"{','.join(RUN_TIME)}=n;mscoree,mshtml=",
        }

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Runs it to its end; stdout and stderr are kept."""
        return subprocess.run(
            [self._wine, self._folder / "generate.exe", *arguments],
            env=self._environment,
            check=False,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=SECONDS,
        )


def here(model: Path, count: int, prompt: str, options: dict[str, str]) -> list[int]:
    """The tokens that the program is to print, generated with the library of this system."""
    flownpu.register()
    name = flownpu.get_ep_name()
    config = genai.Config(str(model))
    config.clear_providers()
    config.append_provider(name)
    for key, value in options.items():
        config.set_provider_option(name, key, value)
    opened = genai.Model(config)
    given = genai.Tokenizer(opened).encode(prompt)
    parameters = genai.GeneratorParams(opened)
    parameters.set_search_options(do_sample=False, max_length=len(given) + count)
    generator = genai.Generator(opened, parameters)
    generator.append_tokens(given)
    while not generator.is_done():
        generator.generate_next_token()
    return [int(token) for token in generator.get_sequence(0)]


def check(wine: Wine, model: Path, work: Path) -> list[str]:
    """What is wrong under Wine, a line each; says what it looks at."""
    # Characters that no code page of one byte has, and more of them than Windows' 260.
    copy = work / "models" / "模型"
    shutil.rmtree(copy.parent, ignore_errors=True)
    shutil.copytree(model, copy)
    wrong = []
    for isa in instruction_sets():
        for prompt in PROMPTS:
            expected = here(model, TOKENS, prompt, {"cpu_isa": isa})
            done = wine.run(str(copy), str(TOKENS), prompt, f"cpu_isa={isa}")
            same = done.stdout.split() == [str(token) for token in expected]
            sys.stdout.write(f"cpu_isa={isa}, {len(expected)} tokens: {'the same' if same else 'others'}\n")
            if not same:
                wrong.append(f"cpu_isa={isa}: expected {expected}, got {done.stdout}{done.stderr}")
    done = wine.run(str(copy), "1", "a", "device=npu")
    if done.returncode != 1 or "expected Linux, got Windows" not in done.stderr:
        wrong.append(f"device=npu: expected an error that names Linux, got {done.returncode}: {done.stderr}")
    return wrong


def instruction_sets() -> tuple[str, ...]:
    """Those of the kernels that this processor has."""
    best = describe_machine().isa
    names = ("avx512", "avx2", "generic")
    return names[0 if best == "avx512 with vnni and bf16" else 2 if best == "generic" else 1 :]


def main() -> None:
    """Builds, says what with its size and sum, and tests it where there is Wine."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, help="a folder that `flownpu convert` made")
    parser.add_argument("--work", type=Path, default=WORK, help="where to build")
    parser.add_argument("--dist", type=Path, default=DIST, help="what gets the files")
    arguments = parser.parse_args()
    work = arguments.work.resolve()
    for file in (made := build(work, arguments.dist.resolve())):
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        sys.stdout.write(f"{digest}  {file.stat().st_size / 2**20:5.2f} MiB  {file.name}\n")
    wine = shutil.which("wine64") or shutil.which("wine")
    if wine is None:
        sys.exit("built, and not tested: there is no Wine here to run it (Debian, Ubuntu: apt install wine64)")
    if wrong := check(Wine(wine, work, [*made, *runtimes(work)]), arguments.model.resolve(), work):
        sys.exit("\n".join(["under Wine:", *wrong]))


if __name__ == "__main__":
    main()
