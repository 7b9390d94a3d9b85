# SPDX-License-Identifier: Apache-2.0
"""Linux's part of `flownpu.system`."""

from __future__ import annotations

import contextlib
import fcntl
import os
import platform
import signal
import socket
import subprocess
import sys
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

ENDING_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
"""Those by which a service manager, or a terminal that closes, ends a program."""
NEW_GROUP: dict[str, Any] = {"start_new_session": True}
"""What Popen is told to start a process that the terminal's Ctrl-C does not reach."""
OPENCL_LOADER = "libOpenCL.so.1"


def library_file(name: str) -> str:
    """What the file of a shared library is called."""
    return f"lib{name}.so"


def processor(root: Path, kernels: Iterable[str]) -> tuple[str, set[str]]:
    """The model name and the flags of the first processor; the machine's type and no flags where /proc is not there.

    Args:
        root: where /proc is looked for.
        kernels: is for systems that tell no flags.
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
    """Has the calling thread run on this processor alone."""
    os.sched_setaffinity(0, {number})  # 0: the calling thread


def lock(descriptor: int) -> bool:
    """Takes an open file or folder for this process alone, until it is closed; whether nobody else had it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # another process has it; or a file system without locks
        return False
    return True


def open_to_lock(folder: Path) -> int:
    """A descriptor for `lock` that stands for a folder, which may be moved while it is open."""
    return os.open(folder, os.O_RDONLY)


def start_connected(command: list[str]) -> tuple[subprocess.Popen[bytes], Connection[Any, Any]]:
    """Starts a Python program that calls `connect_to_parent`; what it prints goes to stderr.

    Returns:
        The process, and the connection to it, over a socket.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [*command, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr,
        )
    return process, Connection(ours.detach())


def connect_to_parent() -> Connection[Any, Any]:
    """The other end, in a process that `start_connected` has started."""
    return Connection(int(sys.argv[-1]))


def end_with_children(process: subprocess.Popen[bytes], seconds: float) -> None:
    """Ends a process that was started with NEW_GROUP, and what it started.

    Args:
        process: gets SIGTERM.
        seconds: that it has, before all of its group is killed.
    """
    process.terminate()
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def prepare_streams() -> None:
    """Nothing: Python writes what the locale says, and UTF-8 where that says nothing."""
