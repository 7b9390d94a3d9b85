# SPDX-License-Identifier: Apache-2.0
"""Linux's part of `flownpu.system`."""

from __future__ import annotations

import contextlib
import fcntl
import os
import platform
import resource
import signal
import socket
import subprocess
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable
    from multiprocessing.connection import Connection
    from pathlib import Path

ENDING_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
"""The signals with which a service manager, or a terminal that closes, ends a program."""
NEW_GROUP: dict[str, Any] = {"start_new_session": True}
"""Arguments of Popen for a process that the terminal's Ctrl-C does not reach."""
OPENCL_LOADER = "libOpenCL.so.1"


def library_file(name: str) -> str:
    """The file name of a shared library."""
    return f"lib{name}.so"


def processor(root: Path, kernels: Iterable[str]) -> tuple[str, set[str]]:
    """The model name and the flags of the first processor; the machine's type and no flags where there is no /proc.

    Args:
        root: the folder below which /proc is looked for.
        kernels: not used here: for systems that do not tell the flags.
    """
    del kernels
    try:
        lines = (root / "proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor() or platform.machine(), set()
    # x86 says "model name" and "flags", Arm "Features" and no name.
    fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in reversed(lines))}
    return fields.get("model name", platform.machine()), set(fields.get("flags", fields.get("Features", "")).split())


def keep_on(number: int) -> None:
    """Binds the calling thread to the processor of this number."""
    os.sched_setaffinity(0, {number})  # 0: the calling thread


def limit_memory(size: int) -> None:
    """Bounds this process's address space to `size` bytes; more raises MemoryError."""
    resource.setrlimit(resource.RLIMIT_AS, (size, size))


def lock(descriptor: int) -> bool:
    """Locks an open file or folder for this process until it is closed; False if it could not be locked."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # another process has it, or the file system has no locks
        return False
    return True


def open_to_lock(folder: Path) -> int:
    """Opens a descriptor by which `lock` locks a folder; the folder may be renamed while it is open."""
    return os.open(folder, os.O_RDONLY)


def start_connected(command: list[str]) -> tuple[subprocess.Popen[bytes], Connection[Any, Any]]:
    """Starts a Python program that calls `connect_to_parent`; its output goes to stderr.

    Returns:
        The process, and the connection to it, over a socket.
    """
    from multiprocessing.connection import Connection  # noqa: PLC0415 each command would import it, and a server uses it

    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [*command, str(theirs.fileno())], pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=sys.stderr
        )
    return process, Connection(ours.detach())


def connect_to_parent() -> Connection[Any, Any]:
    """The connection to the parent, in a process that `start_connected` started."""
    from multiprocessing.connection import Connection  # noqa: PLC0415 see start_connected

    return Connection(int(sys.argv[-1]))


def end_with_children(process: subprocess.Popen[bytes], seconds: float) -> None:
    """Ends a process that was started with NEW_GROUP, and the processes that it started.

    Args:
        process: gets SIGTERM.
        seconds: how long it has to end before its whole group is killed.
    """
    process.terminate()
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def prepare_streams() -> None:
    """Does nothing: Python uses the locale's encoding, and UTF-8 where the locale names none."""
