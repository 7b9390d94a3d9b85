# SPDX-License-Identifier: Apache-2.0
"""The output folder of a conversion: whole, or not there.

Everything is written into a sibling folder with a temporary name, which is renamed at the end. Whatever happens before
that (an error, Ctrl-C, a full disk) removes it, and leaves what was at the output's place as it was.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from flownpu.convert.errors import ConversionError
from flownpu.model.folder import MANIFEST

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["check_output", "output_folder"]


def check_output(output: Path, *, force: bool) -> None:
    """Raises ConversionError unless `output` may be written: it does not exist, is empty, or `force` may replace it.

    Only a folder that a conversion wrote is ever replaced: one with a manifest.
    """
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
    """A new folder to write into, which becomes `output` if the block ends without an exception.

    Args:
        output: the folder to make; its parents are made too.
        force: replace a model that is there.
        size: bytes that will be written, to be refused at once where the disk has not that much room.

    Raises:
        ConversionError: `output` exists, the disk is full or has not enough room, or the folder cannot be made.
    """
    check_output(output, force=force)
    output = Path(os.path.abspath(output))  # noqa: PTH100  (resolve() would follow a link that is the output itself)
    made = [parent for parent in output.parents if not parent.exists()]
    temporary: Path | None = None
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        _check_room(output.parent, size)
        temporary = _sibling(output, "partial")
        yield temporary
        _replace(temporary, output)
    except BaseException as error:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)
        for parent in made:
            if parent.is_dir() and not any(parent.iterdir()):
                parent.rmdir()
        if isinstance(error, OSError):
            raise _explain(error, output) from error
        raise


def _sibling(output: Path, kind: str) -> Path:
    """A new hidden folder beside the output, with the permissions any new folder gets (mkdtemp's are narrower)."""
    folder = output.with_name(f".{output.name}.{secrets.token_hex(4)}.{kind}")
    folder.mkdir()
    return folder


def _check_room(folder: Path, size: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < size:
        raise ConversionError(
            f"{folder}: the output takes {size / 1e6:.0f} MB, and the disk has {free / 1e6:.0f} MB free; "
            "make room, or choose another disk"
        )


def _replace(temporary: Path, output: Path) -> None:
    """Puts the finished folder in the output's place; a model that was there goes only when the new one is in place."""
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


def _explain(error: OSError, output: Path) -> ConversionError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return ConversionError(
            f"{output}: the disk became full while the output was written; make room, or choose another disk. "
            "Nothing was left behind"
        )
    return ConversionError(f"{output}: cannot be written: {error}")
