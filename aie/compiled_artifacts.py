# SPDX-License-Identifier: Apache-2.0
"""A folder of artifacts for an NPU: what artifacts.py compiles, families of calls (call_family.py) and the index.

A call that depends on the position is compiled at the positions that its family is derived from, each a call of its
own to artifacts.py: `<call>-position<position>`.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

import numpy as np

from flownpu.aie.artifact_index import Index
from flownpu.aie.artifacts import write_bytes
from flownpu.aie.programs.program import calls_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from flownpu.aie.artifacts import ArtifactFolder
    from flownpu.aie.programs.call import ArtifactCall
    from flownpu.aie.programs.program import Program

__all__ = ["write_compiled"]


def write_compiled(
    folder: ArtifactFolder, programs: Sequence[Program], *, report: Callable[[ArtifactCall], None] = lambda _: None
) -> int:
    """Compiles the calls of some programs, derives their families and writes the index.

    Without a toolchain plans and MLIR are written, each at the call's last position, and no index.

    Args:
        folder: to add the calls to.
        programs: all that the index is to hold.
        report: hears of each call before it is compiled.

    Returns:
        How many files were compiled.

    Raises:
        PlanError: a plan breaks the hardware's limits.
        ToolchainError: a compiler failed.
        ValueError: a call's instructions follow no rule, two arrays have one name, or an array is compiled and its
            calls are not.
    """
    array_files: dict[str, str] = {}
    complete = True
    for call in calls_of(programs):
        report(call)
        _add(folder, call, call.last)
        xclbin, pdi = folder.xclbin(call.array), folder.pdi(call.array)
        if xclbin is None or pdi is None:
            complete = False
            continue
        family = call.family(_Instructions(folder, call), checks=1, lone_chunks=False)
        identity = zlib.crc32((folder.path / pdi).read_bytes())
        write_bytes(folder.path / call.family_file, family.flatten(call.name, identity).tobytes())
        array_files[call.array] = xclbin
    if complete:
        Index(folder.path, folder.target, emulated=False, programs=programs, array_files=array_files).write()
    return len(folder.compiled)


class _Instructions:
    """The instructions of a call at any position."""

    def __init__(self, folder: ArtifactFolder, call: ArtifactCall) -> None:
        self._folder, self._call = folder, call

    def __call__(self, position: int) -> NDArray[np.int64]:
        call = self._call
        _add(self._folder, call, position)
        file = self._folder.instructions(call.array, _name(call, position))
        if file is None:
            raise ValueError(
                f"[artifacts] expected instructions of {call.name} in {self._folder.path}, whose manifest says that "
                "its array is compiled, and found none: build them into a new folder"
            )
        return np.fromfile(self._folder.path / file, "<u4").astype(np.int64)


def _add(folder: ArtifactFolder, call: ArtifactCall, position: int) -> None:
    plan = call.last_plan if position == call.last else call.plan(position)
    folder.add(call.operator, call.array, _name(call, position), plan)


def _name(call: ArtifactCall, position: int) -> str:
    return f"{call.name}-position{position}" if call.moves else call.name
