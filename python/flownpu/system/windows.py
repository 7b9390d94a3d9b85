# SPDX-License-Identifier: Apache-2.0
"""Windows' part of `flownpu.system`."""

from __future__ import annotations

import contextlib
import ctypes
import io
import os
import platform
import signal
import socket
import subprocess
import sys
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

if TYPE_CHECKING:
    from collections.abc import Iterable

assert sys.platform == "win32"

import msvcrt  # noqa: E402 Windows alone has it
import winreg  # noqa: E402 likewise

# SIGBREAK is Ctrl-Break and a console that closes. Windows sends no SIGTERM: a program can only send it to itself.
ENDING_SIGNALS = (signal.SIGTERM, signal.SIGBREAK)
NEW_GROUP: dict[str, Any] = {"creationflags": subprocess.CREATE_NEW_PROCESS_GROUP}
OPENCL_LOADER = "OpenCL.dll"

_PROCESSOR = r"HARDWARE\DESCRIPTION\System\CentralProcessor\0"
# The processor flags, by Linux's names, that each instruction set of the kernels implies
# (ops/system/processor_features.h).
_AVX2 = {"avx2", "fma", "f16c"}
_AVX512 = {*_AVX2, "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni", "avx512_bf16"}
_FLAGS = {"generic": set[str](), "avx2": _AVX2, "avx512": _AVX512, "amx": {*_AVX512, "amx_int8"}}
# The offset of the byte that `lock` locks. It is beyond the end of any file, because other processes cannot read a
# locked byte.
_BEYOND = 2**62
_AT_ONCE, _EXCLUSIVE = 1, 2  # LOCKFILE_FAIL_IMMEDIATELY, LOCKFILE_EXCLUSIVE_LOCK


class _Place(ctypes.Structure):
    """Windows' struct OVERLAPPED: the offset in a file at which an operation takes place."""

    _fields_ = (
        ("internal", ctypes.c_size_t),
        ("internal_high", ctypes.c_size_t),
        ("offset", ctypes.c_uint64),
        ("event", ctypes.c_void_p),
    )


def library_file(name: str) -> str:
    """The file name of a shared library."""
    return f"{name}.dll"


def processor(root: Path, kernels: Iterable[str]) -> tuple[str, set[str]]:
    """The model name of the first processor, and its flags by Linux's names.

    Args:
        root: not used here: for systems that tell it in files.
        kernels: those instruction sets of the CPU kernels that the processor has; the flags are theirs.
    """
    del root
    try:
        with winreg.OpenKey(winreg.HKEY_LOCAL_MACHINE, _PROCESSOR) as key:
            name = str(winreg.QueryValueEx(key, "ProcessorNameString")[0]).strip()
    except OSError:
        name = platform.processor() or platform.machine()
    return name, set().union(*(_FLAGS[isa] for isa in kernels))


def keep_on(number: int) -> None:
    """Binds the calling thread to the processor of this number.

    Raises:
        OSError: Windows refuses.
    """
    kernel = ctypes.WinDLL("kernel32", use_last_error=True)
    kernel.GetCurrentThread.restype = ctypes.c_void_p
    kernel.SetThreadAffinityMask.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    kernel.SetThreadAffinityMask.restype = ctypes.c_size_t
    if not kernel.SetThreadAffinityMask(kernel.GetCurrentThread(), 1 << number):
        raise ctypes.WinError(ctypes.get_last_error())


def limit_memory(size: int) -> None:
    """Does nothing: Windows bounds the memory of a job, which must be made before the process starts."""
    del size


def lock(descriptor: int) -> bool:
    """Locks an open file for this process until it is closed; False if it could not be locked.

    Other processes may still read and write it.
    """
    kernel = ctypes.WinDLL("kernel32", use_last_error=True)
    kernel.LockFileEx.argtypes = (ctypes.c_void_p, *[ctypes.c_uint32] * 4, ctypes.POINTER(_Place))
    place = _Place(offset=_BEYOND)
    # Not msvcrt.locking, which locks at the file's position: file systems do not allow so large a position.
    return bool(kernel.LockFileEx(msvcrt.get_osfhandle(descriptor), _EXCLUSIVE | _AT_ONCE, 0, 1, 0, place))


def open_to_lock(folder: Path) -> int:
    """Opens a descriptor by which `lock` locks a folder; the folder may be renamed while it is open.

    Windows renames no folder with an open file in it. So the file that is locked is in the temporary folder, named
    after the folder, whose name must be unique; it is deleted when the descriptor is closed.
    """
    file = Path(tempfile.gettempdir()) / f"flownpu-{folder.name}.lock"
    return os.open(file, os.O_RDWR | os.O_CREAT | os.O_TEMPORARY | os.O_BINARY)


def start_connected(command: list[str]) -> tuple[subprocess.Popen[bytes], Connection[Any, Any]]:
    """Starts a Python program that calls `connect_to_parent`; what it prints goes to stderr.

    Returns:
        The process, and the connection to it, over a socket. The child gets its end on stdin, as data from
        `socket.share`, which Windows makes for the child's process id.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=sys.stderr)
        assert process.stdin is not None
        # fails if the child has ended, which the connection will show
        with contextlib.suppress(OSError), process.stdin:
            process.stdin.write(theirs.share(process.pid))
    return process, Connection(ours.detach())


def connect_to_parent() -> Connection[Any, Any]:
    """The connection to the parent, in a process that `start_connected` started."""
    return Connection(socket.fromshare(sys.stdin.buffer.read()).detach())


def end_with_children(process: subprocess.Popen[bytes], seconds: float) -> None:
    """Kills a process and the processes that it started: Windows has no way to ask them to end.

    Args:
        process: is killed.
        seconds: not used here: for systems that ask first.
    """
    del seconds
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
    process.kill()
    process.wait()


def prepare_streams() -> None:
    """Sets stdin, stdout and stderr to UTF-8 where they are files or pipes, as Python does from 3.15 on.

    The code page that they have otherwise lacks most characters; a console takes all. PYTHONIOENCODING has precedence.
    """
    if "PYTHONIOENCODING" in os.environ:
        return
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and not stream.isatty():
            stream.reconfigure(encoding="utf-8")
