# SPDX-License-Identifier: Apache-2.0
"""Makes the output folder of a conversion so that it is either complete or not there.

Everything is written into a folder with a temporary name beside the output, which is renamed at the end. Where the
output's own folder must stay (an empty folder, a mount point, the working directory), the temporary folder is made in
it, and its files are moved up at the end. If anything interrupts this (an error, Ctrl-C, a full disk), the temporary
folder is removed, and the output stays as it was before. If the process is killed, the next conversion to the same
output removes what it left.
"""

import errno
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from flownpu.convert.errors import ConversionError
from flownpu.model.folder import MANIFEST
from flownpu.system import lock, open_to_lock

_MOUNTS = Path("/proc/self/mountinfo")


def check_output(output: Path, *, force: bool) -> None:
    """Raises ConversionError unless `output` may be written: it does not exist, is empty, or `force` may replace it.

    Only a folder that a conversion wrote is ever replaced: one with a manifest.
    """
    _remove_left(output)
    if not output.exists() and not output.is_symlink():
        return
    if not output.is_dir():
        raise ConversionError(f"{output} exists and is no folder; choose another output")
    if not any(output.iterdir()):
        return
    if not (output / MANIFEST).is_file():
        raise ConversionError(f"{output} exists and holds files that no conversion wrote; choose another output")
    if not force:
        raise ConversionError(f"{output} exists; give another output, or --force to replace it")


@contextmanager
def output_folder(output: Path, *, force: bool, size: int) -> Iterator[Path]:
    """A context with a new folder to write into, which becomes `output` if the block ends without an exception.

    Args:
        output: the folder to make; its parents are made too.
        force: replace a model that a conversion wrote to `output`.
        size: how many bytes will be written; a disk with less free space is refused at once.

    Raises:
        ConversionError: `output` exists, the disk is full or has too little free space, or the folder cannot be made.
    """
    check_output(output, force=force)
    output = Path(os.path.abspath(output))  # noqa: PTH100  (resolve() would follow a link that is the output itself)
    new_parents = [parent for parent in output.parents if not parent.exists()]
    stays = _stays(output)
    beside = output / "in" if stays else output  # temporary folders get names after this path, and lie beside it
    temporary: Path | None = None
    lock = -1
    try:
        beside.parent.mkdir(parents=True, exist_ok=True)
        _check_room(beside.parent, size)
        temporary = _sibling(beside, "partial")
        lock = _lock(temporary)
        yield temporary
        if stays:
            _move_up(temporary, output)
        else:
            _replace(temporary, output)
    except BaseException as error:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)
        for parent in new_parents:
            if parent.is_dir() and not any(parent.iterdir()):
                parent.rmdir()
        if isinstance(error, OSError):
            raise _explain(error, output) from error
        raise
    finally:
        if lock >= 0:
            os.close(lock)


def _stays(output: Path) -> bool:
    """Whether the folder must not be renamed: it is empty, a mount point, or has this process's working directory."""
    if not output.is_dir() or output.is_symlink():
        return False
    is_current = output.resolve() in [Path.cwd(), *Path.cwd().parents]
    return is_current or not any(output.iterdir()) or _is_mount_point(output)


def _is_mount_point(folder: Path) -> bool:
    if os.path.ismount(folder):
        return True
    # ismount misses a folder that is mounted within its own file system, as containers do. Field 5 of a line is where
    # something is mounted, with spaces written as \\040.
    places = _MOUNTS.read_text(encoding="utf-8").splitlines() if _MOUNTS.is_file() else []
    return str(folder.resolve()).replace(" ", r"\040") in {line.split()[4] for line in places}


def _sibling(output: Path, kind: str) -> Path:
    """Makes a hidden folder beside the output, with the permissions of any new folder (mkdtemp's are narrower)."""
    folder = output.with_name(f".{output.name}.{secrets.token_hex(4)}.{kind}")
    folder.mkdir()
    return folder


def _lock(folder: Path) -> int:
    """A descriptor that locks a folder until it is closed or this process ends; -1 if the folder cannot be locked."""
    descriptor = open_to_lock(folder)
    if lock(descriptor):
        return descriptor
    # another process writes into the folder, or the file system has no locks: such folders are kept
    os.close(descriptor)
    return -1


def _remove_left(output: Path) -> None:
    """Removes the temporary folders of earlier conversions to this output whose process was killed."""
    output = Path(os.path.abspath(output))  # noqa: PTH100
    for folder, name in ((output.parent, output.name), (output, "in")):
        left = re.compile(rf"\.{re.escape(name)}\.[0-9a-f]{{8}}\.partial")
        for path in folder.iterdir() if folder.is_dir() else ():
            if left.fullmatch(path.name) and (lock := _lock(path)) >= 0:
                shutil.rmtree(path, ignore_errors=True)
                os.close(lock)


def _check_room(folder: Path, size: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < size:
        raise ConversionError(
            f"{folder}: the output takes {size / 1e6:.0f} MB, and the disk has {free / 1e6:.0f} MB free; "
            "make room, or choose another disk"
        )


def _replace(temporary: Path, output: Path) -> None:
    """Renames the finished folder to the output; a model that was there is removed only after that."""
    if not output.exists():
        temporary.rename(output)
        return
    previous = _sibling(output, "previous")
    output.rename(previous / output.name)
    try:
        temporary.rename(output)
    except BaseException:
        (previous / output.name).rename(output)
        previous.rmdir()
        raise
    shutil.rmtree(previous, ignore_errors=True)


def _move_up(temporary: Path, output: Path) -> None:
    """Moves the finished folder's files up into the output; a model that was there is removed only after that."""
    previous = _sibling(output / "in", "previous")
    old = [path for path in output.iterdir() if path not in (temporary, previous)]
    # The manifest is moved first. If the process is killed in between, the folder has a manifest, and may be replaced.
    new = sorted(temporary.iterdir(), key=lambda path: path.name != MANIFEST)
    moves = [(path, previous / path.name) for path in old] + [(path, output / path.name) for path in new]
    done: list[tuple[Path, Path]] = []
    try:
        for source, target in moves:
            source.rename(target)
            done.append((source, target))
    except BaseException:
        for source, target in reversed(done):
            with suppress(OSError):  # the first error is raised
                target.rename(source)
        previous.rmdir()
        raise
    shutil.rmtree(previous, ignore_errors=True)
    temporary.rmdir()


def _explain(error: OSError, output: Path) -> ConversionError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return ConversionError(
            f"{output}: the disk became full while the output was written; make room, or choose another disk. "
            "Nothing was left behind"
        )
    return ConversionError(f"{output}: cannot be written: {error}")
