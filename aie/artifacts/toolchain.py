# SPDX-License-Identifier: Apache-2.0
"""Finds and calls AMD's open toolchain: Peano compiles kernels, aiecc makes a PDI and instructions from MLIR.

XRT's xclbinutil packs the PDI (xclbin.py).

The options are those of mlir-aie in generation C (1.4.5 and newer; tools/aiecc/README.md and
python/utils/compile/utils.py there), whose dialect is what mlir/module.py prints, and which takes Peano of LLVM 22
(its utils/peano-requirements.txt in September 2026: llvm-aie 22.0.0.2026092401). Another pair is refused before it
compiles anything.

Each release of mlir_aie has a page of wheels of its own, `latest-wheels-4` has builds between releases, and llvm-aie's
`nightly` has its newest builds only. PyPI has none of them.

**Neither compiler has been on the machines this was written on**: what is tested is which commands are run, with
stand-ins that record them. xclbinutil is Debian's own in the tests.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from flownpu.aie.mlir.module import DIALECT

if TYPE_CHECKING:
    from collections.abc import Sequence

KERNELS = Path(__file__).parents[1] / "kernels"
OLDEST_XRT = (2, 19)
"""The first version with xrt::ext::bo and run lists for NPUs (ops/npu/xrt/table.cc refuses older ones)."""
PEANO_RELEASE = 22
"""The release of LLVM whose text mlir_aie 1.4.5 writes, and which Peano therefore has to be of."""
SMALLER = ("-Os", "-fno-inline")
"""More options for kernels that do not fit: loops are not unrolled but where the source says so, and functions that
aie_api does not force into their callers stay functions. FastFlowLM's open kernels have -fno-inline, too."""
_ARCHITECTURES = {"npu1": "aie2", "npu2": "aie2p"}
_OTHER_OPTIONS = re.compile("[Uu]nknown (output selector|command line argument)|did not write")  # LLVM's words, ours
_SHOWN_LINES = 20  # characters kept of a failed command's output, whose errors come last
_WHEELS = "https://github.com/Xilinx"
_RELEASE = ".".join(map(str, DIALECT))
_AIECC_WHEEL = f"pip install 'mlir_aie>={_RELEASE}'" + "".join(
    f" -f {_WHEELS}/mlir-aie/releases/expanded_assets/{page}" for page in (f"v{_RELEASE}", "latest-wheels-4")
)
_PEANO_WHEEL = f"pip install 'llvm-aie=={PEANO_RELEASE}.*' -f {_WHEELS}/llvm-aie/releases/expanded_assets/nightly"
_XRT = Path("/opt/xilinx/xrt")  # where AMD's own packages install it


class ToolchainError(RuntimeError):
    """A compiler failed. The message has the command and the end of its output, `output` the whole output."""

    def __init__(self, message: str, output: str = "") -> None:
        super().__init__(message)
        self.output = output

    @property
    def larger_stacks(self) -> dict[int, int]:
        """For each stack that aiecc found too small: the requested size in bytes."""
        said = r"stack_size = (\d+) is insufficient: this core needs \d+ bytes; increase stack_size to (\d+)"
        sizes: dict[int, int] = {}
        for had, need in re.findall(said, self.output):
            sizes[int(had)] = max(int(need), sizes.get(int(had), 0))
        return sizes

    @property
    def overflow(self) -> int:
        """By how many bytes the linker found the largest core's code too large for program memory; 0: it did not."""
        said = r"will not fit in region 'program': overflowed by (\d+) bytes"
        return max(map(int, re.findall(said, self.output)), default=0)


@dataclass(frozen=True)
class MissingTool:
    """A missing part of the toolchain, and the way to get it."""

    name: str
    searched: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.name} was not found ({self.searched}): {self.remedy}"


@dataclass(frozen=True)
class Toolchain:
    """The two compilers and xclbinutil, and what `--version` says of them; `peano` is the folder it is installed in."""

    aiecc: Path
    peano: Path
    xclbinutil: Path
    versions: dict[str, str]

    def kernel_options(self, target: str, flags: Sequence[str] = ()) -> list[str]:
        """Peano's options for any kernel's source, without the names of files."""
        return [
            f"--target={_ARCHITECTURES[target]}-none-unknown-elf",
            "-std=c++20",
            "-O2",
            "-DNDEBUG",
            # The include guard of aie_api's bridge to a header that only Vitis has: keeps the bridge out.
            "-D__AIE_API_AIE_ADF_HPP__",
            "-ffunction-sections",
            "-fdata-sections",
            # aiecc compares the frames with the core's stack.
            "-fstack-size-section",
            *flags,
        ]

    def compile_kernel(self, source: Path, include_root: Path, target: str, flags: Sequence[str], output: Path) -> None:
        """Compiles a kernel's source into an object file.

        Args:
            source: the C++ file.
            include_root: folder that holds `aie/kernels/`.
            target: npu1 or npu2.
            flags: more options of the compiler.
            output: the object file; on an error there is none.

        Raises:
            ToolchainError: the compiler failed.
        """
        headers = self.aiecc.resolve().parents[1] / "include"
        command: list[str | Path] = [self.peano / "bin" / "clang++", *self.kernel_options(target, flags)]
        command += [f"-I{include_root}", f"-I{headers}", "-c", source, "-o", output]
        run_tool(command, output.parent)
        expect_file(output, command)

    def compile_design(self, mlir: Path, sequences: Sequence[str], pdi: Path | None) -> list[Path]:
        """Makes the instructions of a design's sequences, or its PDI, or both.

        Args:
            mlir: the design; the object files that it links lie beside it.
            sequences: the names of all its sequences; empty: no instructions this time.
            pdi: file to write, the configuration of the array; None: not this time.

        Returns:
            For each sequence the file with its instructions, the transaction that XRT sends.

        Raises:
            ToolchainError: aiecc failed, or said "error:" (it may exit with 0 all the same), or is too old.
        """
        work = mlir.parent / "work"
        command: list[str | Path] = [self.aiecc, mlir, f"--peano={self.peano}", f"--tmpdir={work}"]
        # aiecc writes a file for each sequence, with <device>_<sequence> in place of {0}; unnamed devices are `main`.
        instructions = [mlir.with_name(f"main_{sequence}.insts") for sequence in sequences]
        if instructions:
            command += ["--get-npu-insts", f"--npu-insts-name={mlir.with_name('{0}.insts')}"]
        if pdi is not None:
            command += ["--get-pdi", f"--pdi-name={pdi}"]
        try:
            output = run_tool(command, mlir.parent)
            if re.search(r"\berror:", output):
                raise _failure(command, "said that there was an error", output)
            for file in (*instructions, *([pdi] if pdi else [])):
                expect_file(file, command)
        except ToolchainError as error:
            if not _OTHER_OPTIONS.search(str(error)):
                raise
            versions = f"expected the options of mlir_aie {_RELEASE} or newer, found {self.versions['aiecc']}"
            raise ToolchainError(f"{error}\n{versions}: {_AIECC_WHEEL}", error.output) from error
        return instructions


def find_toolchain() -> tuple[Toolchain | None, list[MissingTool]]:
    """The installed toolchain, or None and its parts that are missing or do not go together.

    Searched in this order: for aiecc the environment variable AIECC_PATH, mlir-aie's wheel in this Python, PATH; for
    Peano PEANO_INSTALL_DIR, llvm-aie's wheel in this Python; for xclbinutil AIE_XCLBINUTIL (which aiecc reads too),
    PATH, where AMD's packages install XRT.

    Raises:
        ToolchainError: a tool is there, but cannot say its version.
    """
    packages = Path(sysconfig.get_paths()["purelib"])
    aiecc = _first(os.environ.get("AIECC_PATH"), packages / "mlir_aie" / "bin" / "aiecc", shutil.which("aiecc"))
    folders = [os.environ.get("PEANO_INSTALL_DIR"), packages / "llvm-aie"]
    clang = _first(*(Path(folder) / "bin" / "clang++" for folder in folders if folder))
    missing = []
    if aiecc is None:
        missing.append(MissingTool("aiecc", "AIECC_PATH, mlir_aie's wheel, PATH", _AIECC_WHEEL))
    if clang is None:
        missing.append(MissingTool("Peano", "PEANO_INSTALL_DIR, llvm-aie's wheel", _PEANO_WHEEL))
    if aiecc is not None and clang is not None:
        missing += _mismatch(_version(aiecc, "mlir_aie"), _version(clang, "llvm_aie"))
    xclbinutil = _first(os.environ.get("AIE_XCLBINUTIL"), shutil.which("xclbinutil"), _XRT / "bin" / "xclbinutil")
    packer = _version(xclbinutil) if xclbinutil else ""
    found = re.search(r"(\d+)\.(\d+)", packer)
    if found is None or (int(found[1]), int(found[2])) < OLDEST_XRT:
        searched = f"found {packer or 'one without a version'}" if xclbinutil else f"AIE_XCLBINUTIL, PATH, {_XRT}"
        oldest = ".".join(map(str, OLDEST_XRT))
        package = f"install the package libxrt-utils of XRT {oldest} or newer; `flownpu doctor` says how to get its XRT"
        missing.append(MissingTool("xclbinutil", searched, package))
    if aiecc is None or clang is None or xclbinutil is None or missing:
        return None, missing
    versions = {"aiecc": _version(aiecc, "mlir_aie"), "peano": _version(clang, "llvm_aie"), "xclbinutil": packer}
    return Toolchain(aiecc, clang.parents[1], xclbinutil, versions), []


def _first(*candidates: str | Path | None) -> Path | None:
    return next((Path(file).absolute() for file in candidates if file and Path(file).is_file()), None)


def _mismatch(aiecc: str, peano: str) -> list[MissingTool]:
    """The versions to install if the compilers do not take the printed MLIR, or each other's files.

    Unknown versions, as of a build from source, are accepted.
    """
    both = f"found {aiecc} with {peano}; expected mlir_aie {_RELEASE} or newer with llvm-aie {PEANO_RELEASE}"
    wrong = []
    release = re.match(r"mlir_aie (\d+)\.(\d+)\.(\d+)", aiecc)
    if release and tuple(map(int, release.groups())) < DIALECT:
        wrong.append(MissingTool("an aiecc that takes FlowNPU's MLIR", both, _AIECC_WHEEL))
    llvm = re.match(r"llvm_aie (\d+)", peano) or re.search(r"\bclang version (\d+)", peano)
    if llvm and int(llvm[1]) != PEANO_RELEASE:
        wrong.append(MissingTool("the Peano that belongs to aiecc", both, _PEANO_WHEEL))
    return wrong


def _version(tool: Path, wheel: str = "") -> str:
    """The wheel that a tool is of, with its version; of others the first line that `--version` prints.

    The tool of a wheel is at `<packages>/<folder>/bin/<tool>`, beside the wheel's `.dist-info`.
    """
    packages = tool.resolve().parents[2]
    if wheel and (found := sorted(packages.glob(f"{wheel}-*.dist-info"))):
        return " ".join(found[-1].name.removesuffix(".dist-info").split("-", 1))
    text = run_tool([tool, "--version"], None).strip()
    return text.splitlines()[0] if text else "unknown"


def run_tool(command: Sequence[str | Path], folder: Path | None) -> str:
    """Runs a command in a folder (None: the current one) and returns what it wrote to stdout and stderr.

    Raises:
        ToolchainError: it could not be started, or its exit code was not 0.
    """
    try:
        done = subprocess.run(
            list(map(str, command)),
            cwd=folder,
            check=False,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
    except OSError as error:
        raise ToolchainError(f"[toolchain] {command[0]} cannot be started: {error}") from error
    if done.returncode:
        raise _failure(command, f"ended with exit code {done.returncode}", done.stdout)
    return done.stdout


def expect_file(file: Path, command: Sequence[str | Path]) -> None:
    """Makes sure that a command wrote a file.

    Raises:
        ToolchainError: it did not.
    """
    if not file.is_file():
        raise _failure(command, f"ended well, and did not write {file.name}", "")


def _failure(command: Sequence[str | Path], what: str, output: str) -> ToolchainError:
    lines = output.rstrip().splitlines()[-_SHOWN_LINES:]
    name = Path(command[0]).name
    shown = shlex.join(map(str, command))
    return ToolchainError("\n".join([f"[toolchain] {name} {what}:", *lines, f"the command: {shown}"]), output)
