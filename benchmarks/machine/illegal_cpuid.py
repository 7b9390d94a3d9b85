# SPDX-License-Identifier: Apache-2.0
"""A copy of ONNX Runtime for processors on which CPUID cannot fault.

Each CPUID is UD2 there, as long and illegal, which `hidden_instructions.c` answers. Needs binutils.
"""

import re
import shutil
import subprocess
from pathlib import Path

import onnxruntime

_CPUID, _UD2 = b"\x0f\xa2", b"\x0f\x0b"


def _is_cpuid(library: Path, address: int) -> bool:
    """Whether an instruction begins at the address, and not the middle of another."""
    before = 96  # bytes in which a disassembler that began inside of an instruction finds the next ones
    after = 16  # the longest instruction has 15 bytes; of one that is cut objdump shows the bytes as others
    span = [f"--start-address={address - before}", f"--stop-address={address + after}"]
    command = ["objdump", "-d", *span, str(library)]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    return any(re.match(rf"\s*{address:x}:.*cpuid", line) for line in lines)


def _text(library: Path) -> tuple[int, int, int]:
    """Address, offset and size of the section of instructions."""
    command = ["readelf", "--section-headers", "--wide", str(library)]
    headers = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = re.search(r" \.text +PROGBITS +(\w+) (\w+) (\w+)", headers)
    if found is None:
        raise ValueError(f"expected a section .text, got {headers}")
    address, offset, size = (int(number, 16) for number in found.groups())
    return address, offset, size


def copy_with_illegal_cpuid(folder: Path) -> None:
    """Copies the package into a folder for PYTHONPATH."""
    target = folder / "onnxruntime"
    shutil.copytree(Path(onnxruntime.__file__).parent, target)
    library = next((target / "capi").glob("onnxruntime_pybind11_state*.so"))
    code = bytearray(library.read_bytes())
    address, offset, size = _text(library)
    for found in list(re.finditer(re.escape(_CPUID), code[offset : offset + size])):
        at = offset + found.start()
        if _is_cpuid(library, address + found.start()):
            code[at : at + len(_UD2)] = _UD2
    library.write_bytes(code)
