# SPDX-License-Identifier: Apache-2.0
"""Checks the contents of a wheel: only symbols of old systems, no symbol tables, the licences, the size.

Run it as `python -m scripts.release.contents dist/*.whl`; it prints what is wrong with a wheel.
"""

import io
import re
import sys
import zipfile
from pathlib import Path
from typing import BinaryIO

from auditwheel.error import NonPlatformWheelError, WheelToolsError
from auditwheel.wheel_abi import analyze_wheel_abi
from auditwheel.wheeltools import get_wheel_architecture, get_wheel_libc
from elftools.elf.elffile import ELFFile
from elftools.elf.sections import NoteSection

MIB = 2**20
MOST_BYTES = 8 * MIB
LIBRARIES = ("_native", "libflownpu_aie_xdna", "libflownpu_aie_xdna2", "libflownpu_ep", "libflownpu_xrt")
# NPUs that XRT drives exist only in x86-64 machines.
ONLY_X86 = frozenset({"libflownpu_xrt"})
LICENCES = ("LICENSE", "LICENSES.md", "nanobind.txt", "robin_map.txt")
# Licences of the run-time libraries that Zig links in, by the end of the platform's name (zig.cmake, licences.cmake).
LICENCES_OF_ZIG = {"aarch64": ("zig.txt", "llvm.txt"), "win_amd64": ("zig.txt", "llvm.txt", "mingw-w64.txt")}
# XRT's library and its dependency come from the system; without them there is no NPU to drive, and all else works.
OF_THE_SYSTEM = frozenset({"libxrt_coreutil.so.2", "libuuid.so.1"})
Version = tuple[int, ...]


def faults(wheel: Path) -> list[str]:
    """The faults of a wheel for Linux; empty if it may be released."""
    found = []
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        libraries = {name: archive.read(name) for name in names if name.endswith(".so")}
    stems = {Path(name).name.split(".")[0] for name in libraries}
    wanted = libraries_of(wheel.stem)
    if stems != set(wanted):
        found.append(f"expected the libraries {', '.join(wanted)}, found {', '.join(sorted(stems))}")
    licences = {Path(name).name for name in names if ".dist-info/licenses/" in name}
    found += [f"expected the licence {name}, found none" for name in licences_of(wheel.stem) if name not in licences]
    if wheel.stat().st_size > MOST_BYTES:
        found.append(f"expected at most {MOST_BYTES / MIB:.0f} MiB, found {wheel.stat().st_size / MIB:.1f}")
    found += [
        f"{name} has a symbol table: it is not stripped" for name, data in libraries.items() if _has_symbols(data)
    ]
    found += [
        f"{name} names a folder of this machine: {path}" for name in libraries for path in _paths(libraries[name])
    ]
    claimed, allowed = wheel.stem.split("-")[-1], platform_of(wheel)
    if not _glibc(allowed) or _glibc(allowed) > _glibc(claimed):
        found.append(f"its name says {claimed}, auditwheel {allowed}: `auditwheel show {wheel}` says why")
    return found


def libraries_of(platform: str) -> list[str]:
    """The libraries that a wheel must have for a platform, whose name ends with that of the processor."""
    return [name for name in LIBRARIES if name not in ONLY_X86 or platform.endswith("x86_64")]


def licences_of(platform: str) -> tuple[str, ...]:
    """The licence files that a wheel must have for a platform, whose name ends with that of the processor."""
    of_zig = (names for ending, names in LICENCES_OF_ZIG.items() if platform.endswith(ending))
    return LICENCES + next(of_zig, ())


def platform_of(wheel: Path) -> str:
    """The oldest platform for which auditwheel finds a wheel fit: "manylinux_2_28_x86_64", "linux_x86_64"."""
    try:
        information = analyze_wheel_abi(
            get_wheel_libc(wheel.name),
            get_wheel_architecture(wheel.name),
            wheel,
            OF_THE_SYSTEM,
            # Kernels for later processors are chosen at run time.
            disable_isa_ext_check=True,
            allow_graft=False,
        )
    except (NonPlatformWheelError, WheelToolsError) as error:
        return f"nothing ({error})"
    return str(information.overall_policy.name)


def _glibc(platform: str) -> Version:
    """The version of glibc that a platform's name requires; () if it requires none."""
    match = re.fullmatch(r"manylinux_(\d+)_(\d+)_\w+", platform)
    return (int(match[1]), int(match[2])) if match else ()


def build_id(library: Path) -> str:
    """The number, in hexadecimal, by which debuggers know a library and its debug file."""
    with library.open("rb") as stream:
        for section in _sections(stream):
            if isinstance(section, NoteSection):
                for note in section.iter_notes():
                    if note["n_type"] == "NT_GNU_BUILD_ID":
                        return str(note["n_desc"])
    raise RuntimeError(f"{library} has no build ID: link it with -Wl,--build-id")


def _sections(stream: BinaryIO) -> list[object]:
    return list(ELFFile(stream).iter_sections())


def _has_symbols(library: bytes) -> bool:
    return ELFFile(io.BytesIO(library)).get_section_by_name(".symtab") is not None


def _paths(library: bytes) -> list[str]:
    """Paths of home and working folders in a library, which can only be those of the build machine."""
    return sorted({match.decode() for match in re.findall(rb"/(?:home|root|work|tmp|build)/[\w./+-]+", library)})


def main() -> None:
    """Prints the faults of wheels; the exit code is 1 if there are any."""
    wrong = False
    for wheel in map(Path, sys.argv[1:]):
        found = faults(wheel)
        wrong = wrong or bool(found)
        verdict = "".join(f"\n  {line}" for line in found) or f" is {platform_of(wheel)}"
        sys.stdout.write(f"{wheel.name}{verdict}\n")
    sys.exit(wrong)


if __name__ == "__main__":
    main()
