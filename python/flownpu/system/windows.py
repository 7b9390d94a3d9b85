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

import msvcrt  # noqa: E402 nothing else has it
import winreg  # noqa: E402 likewise

# Ctrl-Break, and a console that closes. SIGTERM is there, and only a program itself sends it to itself.
ENDING_SIGNALS = (signal.SIGTERM, signal.SIGBREAK)
NEW_GROUP: dict[str, Any] = {"creationflags": subprocess.CREATE_NEW_PROCESS_GROUP}
OPENCL_LOADER = "OpenCL.dll"

_PROCESSOR = r"HARDWARE\DESCRIPTION\System\CentralProcessor\0"
# The flags, by Linux's names, that each of the kernels' instruction sets stands for (ops/system/processor_features.h).
_AVX2 = {"avx2", "fma", "f16c"}
_AVX512 = {*_AVX2, "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni", "avx512_bf16"}
_FLAGS = {"generic": set[str](), "avx2": _AVX2, "avx512": _AVX512, "amx": {*_AVX512, "amx_int8"}}
# Where `lock` locks a byte: behind the end of any file, since others cannot read what is locked.
_BEYOND = 2**62
_AT_ONCE, _EXCLUSIVE = 1, 2  # LOCKFILE_FAIL_IMMEDIATELY, LOCKFILE_EXCLUSIVE_LOCK


class _Place(ctypes.Structure):
    """OVERLAPPED: where in a file something is done."""

    _fields_ = (
        ("internal", ctypes.c_size_t),
        ("internal_high", ctypes.c_size_t),
        ("offset", ctypes.c_uint64),
        ("event", ctypes.c_void_p),
    )


def library_file(name: str) -> str:
    """What the file of a shared library is called."""
    return f"{name}.dll"


def processor(root: Path, kernels: Iterable[str]) -> tuple[str, set[str]]:
    """The model name of the first processor, and its flags by Linux's names.

    Args:
        root: is for systems that tell it in files.
        kernels: the instruction sets that it has of those that there are kernels for; of these are the flags.
    """
    del root
    try:
        with winreg.OpenKey(winreg.HKEY_LOCAL_MACHINE, _PROCESSOR) as key:
            name = str(winreg.QueryValueEx(key, "ProcessorNameString")[0]).strip()
    except OSError:
        name = platform.processor() or platform.machine()
    return name, set().union(*(_FLAGS[isa] for isa in kernels))


def keep_on(number: int) -> None:
    """Has the calling thread run on this processor alone.

    Raises:
        OSError: Windows does not let it.
    """
    kernel = ctypes.WinDLL("kernel32", use_last_error=True)
    kernel.GetCurrentThread.restype = ctypes.c_void_p
    kernel.SetThreadAffinityMask.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    kernel.SetThreadAffinityMask.restype = ctypes.c_size_t
    if not kernel.SetThreadAffinityMask(kernel.GetCurrentThread(), 1 << number):
        raise ctypes.WinError(ctypes.get_last_error())


def lock(descriptor: int) -> bool:
    """Takes an open file for this process alone, until it is closed; whether nobody else had it.

    Others may still read and write it.
    """
    kernel = ctypes.WinDLL("kernel32", use_last_error=True)
    kernel.LockFileEx.argtypes = (ctypes.c_void_p, *[ctypes.c_uint32] * 4, ctypes.POINTER(_Place))
    place = _Place(offset=_BEYOND)
    # Not msvcrt.locking, which locks where the file is read: systems of files have no such place.
    return bool(kernel.LockFileEx(msvcrt.get_osfhandle(descriptor), _EXCLUSIVE | _AT_ONCE, 0, 1, 0, place))


def open_to_lock(folder: Path) -> int:
    """A descriptor for `lock` that stands for a folder, which may be moved while it is open.

    A folder with an open file in it may not be moved: the file is elsewhere, of the folder's own name, which is to be
    unique, and goes when it is closed.
    """
    file = Path(tempfile.gettempdir()) / f"flownpu-{folder.name}.lock"
    return os.open(file, os.O_RDWR | os.O_CREAT | os.O_TEMPORARY | os.O_BINARY)


def start_connected(command: list[str]) -> tuple[subprocess.Popen[bytes], Connection[Any, Any]]:
    """Starts a Python program that calls `connect_to_parent`; what it prints goes to stderr.

    Returns:
        The process, and the connection to it, over a socket, which Windows makes another process's by its number: what
        it is told of that comes on its stdin.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=sys.stderr)
        assert process.stdin is not None
        with contextlib.suppress(OSError), process.stdin:  # it has ended already, as the connection will tell
            process.stdin.write(theirs.share(process.pid))
    return process, Connection(ours.detach())


def connect_to_parent() -> Connection[Any, Any]:
    """The other end, in a process that `start_connected` has started."""
    return Connection(socket.fromshare(sys.stdin.buffer.read()).detach())


def end_with_children(process: subprocess.Popen[bytes], seconds: float) -> None:
    """Ends a process and what it started, at once: Windows has no way to ask.

    Args:
        process: is ended.
        seconds: is for systems that ask.
    """
    del seconds
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
    process.kill()
    process.wait()


def prepare_streams() -> None:
    """Files and pipes are in UTF-8, as Python has them from 3.15 on, not in the code page, which lacks most characters.

    A console takes them all. What PYTHONIOENCODING says stays.
    """
    if "PYTHONIOENCODING" in os.environ:
        return
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and not stream.isatty():
            stream.reconfigure(encoding="utf-8")
