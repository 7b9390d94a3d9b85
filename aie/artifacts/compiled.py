# SPDX-License-Identifier: Apache-2.0
"""Fills an NPU's folder of artifacts: compiled files (folder.py), families of calls (programs/call_family.py), index.

If a call depends on the position, its family is derived from its instructions at a number of sample positions. Only a
few of these are compiled, each as a call `<call>-position<position>` of folder.py; the instructions at the other
samples are assembled from pieces of the compiled ones (instruction_pieces.py). If a compiler's instructions do not
consist of such pieces, all samples are compiled.
"""

from __future__ import annotations

import math
import random
import zlib
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from flownpu.aie.artifacts.folder import write_bytes
from flownpu.aie.artifacts.index import Index
from flownpu.aie.artifacts.instruction_pieces import InstructionPieces, PieceError
from flownpu.aie.plan.instructions import WORD_BYTES, blank
from flownpu.aie.plan.limits import LIMITS
from flownpu.aie.programs.program import calls_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from flownpu.aie.artifacts.folder import ArtifactFolder
    from flownpu.aie.programs.call import ArtifactCall
    from flownpu.aie.programs.call_family import CallFamily
    from flownpu.aie.programs.program import Program

_NAMED = 3  # how many of the largest items an error names if the heap has no room for all
_COMPARED = 2  # positions of a call that are compiled only to verify the pieces
# aiecc compiles an array's cores for each program, as it places buffers afterwards. Published for a design of 32 cores
# (Xilinx/mlir-air#1863, August 2026): 6.4 and 6.7 s with -j 1, 3.3 s with -j 0 on 24 processors. Since then aiecc links
# each core once more to measure it, in 30 ms (Xilinx/mlir-aie#3746): 6.7 + 32 * 0.03 s. Three programs of decode_layer,
# whose routes are hard to find, took an aie-opt of March 143 to 275 s each on a loaded machine.
_SECONDS = 7.7


class BuildCost(NamedTuple):
    """The numbers of files to compile if nothing is up to date.

    Attributes:
        arrays: how many xclbins.
        programs: how many files of instructions.
    """

    arrays: int
    programs: int

    def __str__(self) -> str:
        minutes = math.ceil(self.programs * _SECONDS / 60)
        return (
            f"{self.programs} programs of {self.arrays} arrays are compiled, but for what is up to date: predicted "
            f"{minutes} minutes, from {_SECONDS:g} s published for a program of 32 cores on one processor (half of it "
            "on 24 processors; up to minutes for one of decode_layer), and about 2 s more for each kernel's source"
        )


def build_cost(calls: Sequence[ArtifactCall]) -> BuildCost:
    """The number of files to compile for some calls; it is known without a compiler.

    Raises:
        PlanError: a plan breaks the hardware's limits.
    """

    def compilations(call: ArtifactCall) -> int:
        if not call.moves:
            return 1
        return len(_pieced_family(call, lambda position: blank(call.sequence(position).steps))[1].compiled)

    return BuildCost(len({call.array for call in calls}), sum(map(compilations, calls)))


def write_compiled(
    folder: ArtifactFolder,
    programs: Sequence[Program],
    *,
    report: Callable[[ArtifactCall], None] = lambda _: None,
    say: Callable[[str], None] = lambda _: None,
) -> int:
    """Compiles the calls of some programs, derives their families and writes the index.

    Without a toolchain plans and MLIR are written, each at the call's last position, and no index.

    Args:
        folder: the folder to add the calls to.
        programs: all programs that the index is to hold.
        report: called with each call before it is compiled.
        say: called with a text where a call needs many compilations; the text says why.

    Returns:
        How many files were compiled.

    Raises:
        PlanError: a plan breaks the hardware's limits.
        ToolchainError: a compiler failed.
        ValueError: a call's instructions follow no rule, two arrays have one name, an array is compiled and its
            calls are not, or the controller's heap has no room for all.
    """
    array_files: dict[str, str] = {}
    sizes: dict[str, int] = {}  # bytes of each array and call in the controller's heap
    complete = True
    for call in calls_of(programs):
        report(call)
        _add(folder, call, call.last)
        xclbin, pdi = folder.xclbin(call.array), folder.pdi(call.array)
        if xclbin is None or pdi is None:
            complete = False
            continue
        family = _family(folder, call, say)
        identity = zlib.crc32((folder.path / pdi).read_bytes())
        write_bytes(folder.path / call.family_file, family.flatten(call.name, identity).tobytes())
        array_files[call.array] = xclbin
        sizes[call.array] = (folder.path / xclbin).stat().st_size
        sizes[f"{call.array} {call.name}"] = max(len(each.words) for each in family.classes) * WORD_BYTES
    _require_room(sizes, LIMITS[folder.target].heap_bytes)
    if complete:
        Index(folder.path, folder.target, emulated=False, programs=programs, array_files=array_files).write()
    return len(folder.compiled)


def _family(folder: ArtifactFolder, call: ArtifactCall, say: Callable[[str], None]) -> CallFamily:
    """The call's family, derived from a few compiled positions; if that fails, every sample position is compiled."""
    instructions = _Instructions(folder, call)
    if not call.moves:
        return call.family(instructions)
    try:
        return _pieced_family(call, instructions)[0]
    except PieceError as error:
        say(f"{call.array} {call.name}: all classes of positions are compiled, for {error}")
        return call.family(instructions, checks=1, lone_chunks=False)


def _pieced_family(
    call: ArtifactCall, compiler: Callable[[int], NDArray[np.int64]]
) -> tuple[CallFamily, InstructionPieces]:
    """The family, derived from a few compiled positions, and its words with the list of these positions.

    Raises:
        PieceError: the compiler's words are not made of pieces that are known.
    """
    words = InstructionPieces(call.last_plan.array, lambda position: call.sequence(position).steps, compiler)
    words.compile(call.last)
    family = call.family(words, checks=1, lone_chunks=False)
    left = [position for position in range(call.positions.count) if position not in set(words.compiled)]
    for position in random.Random(0).sample(left, min(_COMPARED, len(left))):  # noqa: S311
        words.compile(position)
    return family, words


def _require_room(sizes: dict[str, int], heap: int) -> None:
    """Check that arrays and the instructions of each call, in bytes, fit in a session's only heap."""
    if (need := sum(sizes.values())) > heap:
        largest = sorted(sizes, key=sizes.__getitem__, reverse=True)[:_NAMED]
        named = ", ".join(f"{name} {sizes[name]}" for name in largest)
        raise ValueError(
            f"[artifacts] expected arrays and instructions of {heap} bytes or less together, what the controller's "
            f"heap holds, got {need} bytes ({named}): build for a shorter --context"
        )


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
    folder.add(call.operator, call.array, _name(call, position), call.recorded(position))  # `add` checks the plan


def _name(call: ArtifactCall, position: int) -> str:
    return f"{call.name}-position{position}" if call.moves else call.name
