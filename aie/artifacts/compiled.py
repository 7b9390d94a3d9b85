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

from flownpu.aie.artifacts.folder import compiled_at_once, count_tasks, write_bytes
from flownpu.aie.artifacts.index import Index
from flownpu.aie.artifacts.instruction_pieces import InstructionPieces, PieceError
from flownpu.aie.plan.instructions import WORD_BYTES, blank
from flownpu.aie.plan.limits import LIMITS
from flownpu.aie.programs.program import calls_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from flownpu.aie.artifacts.folder import ArtifactFolder
    from flownpu.aie.plan.data import Plan
    from flownpu.aie.programs.call import ArtifactCall
    from flownpu.aie.programs.call_family import CallFamily
    from flownpu.aie.programs.program import Program

_NAMED = 3  # how many of the largest items an error names if the heap has no room for all
_COMPARED = 2  # positions of a call that are compiled only to verify the pieces
# aiecc compiles an array's cores whenever it is called, as it places buffers afterwards. Published for a design of 32
# cores (Xilinx/mlir-air#1863, August 2026): 6.4 and 6.7 s with -j 1, 3.3 s with -j 0 on 24 processors. Since then aiecc
# links each core once more to measure it, in 30 ms (Xilinx/mlir-aie#3746): 6.7 + 32 * 0.03 s. Routes are found once
# each time, too: for three programs of decode_layer that took an aie-opt of March 143 to 275 s on a loaded machine.
_SECONDS = 7.7
# A bound: aiecc takes 37 s for a whole design with 36,146 transfers and 111 cores (Xilinx/mlir-aie#3689).
_SECONDS_OF_TASK = 1e-3


class BuildCost(NamedTuple):
    """The work of a compilation if nothing is up to date.

    Attributes:
        arrays: how many xclbins.
        programs: how many files of instructions.
        compilations: how often aiecc is called.
        tasks: how many transfers the programs have.
    """

    arrays: int
    programs: int
    compilations: int
    tasks: int

    def __str__(self) -> str:
        minutes = math.ceil((self.compilations * _SECONDS + self.tasks * _SECONDS_OF_TASK) / 60)
        return (
            f"{self.programs} programs of {self.arrays} arrays are compiled in {self.compilations} calls of aiecc, but "
            f"for what is up to date: predicted {minutes} minutes, from {_SECONDS:g} s published for 32 cores on one "
            f"processor (half of it on 24 processors; up to minutes for decode_layer), {1e3 * _SECONDS_OF_TASK:g} ms "
            "or less for each transfer, and about 2 s more for each kernel's source"
        )


def _build_cost(samples: Mapping[str, Mapping[ArtifactCall, Mapping[int, int]]]) -> BuildCost:
    """The work of compiling arrays' calls at positions; the samples have the number of transfers at each."""
    arrays = [[count for tasks in calls.values() for count in tasks.values()] for calls in samples.values()]
    compilations = sum(len(compiled_at_once(tasks)) for tasks in arrays)
    return BuildCost(len(arrays), sum(map(len, arrays)), compilations, sum(map(sum, arrays)))


def _samples(
    call: ArtifactCall, derive: Callable[[ArtifactCall, Callable[[int], NDArray[np.int64]]], object]
) -> dict[int, int]:
    """The positions of a call that `derive` compiles, with their numbers of transfers: they depend on no words.

    Raises:
        PlanError: a plan breaks the hardware's limits.
    """
    tasks: dict[int, int] = {}

    def compiler(position: int) -> NDArray[np.int64]:
        sequence = call.sequence(position)
        tasks[position] = count_tasks(sequence)
        return blank(sequence.steps)

    derive(call, compiler)
    return tasks


def write_compiled(
    folder: ArtifactFolder,
    programs: Sequence[Program],
    *,
    report: Callable[[ArtifactCall], None] = lambda _: None,
    say: Callable[[str], None] = lambda _: None,
) -> int:
    """Compiles the calls of some programs, derives their families and writes the index.

    Without a toolchain MLIR is written, each at the call's last position, and no index.

    Args:
        folder: the folder to add the calls to.
        programs: all programs that the index is to hold.
        report: called with each call before its array is compiled.
        say: called with the predicted cost, and with a text where a call needs many compilations; the text says why.

    Returns:
        How many files were compiled.

    Raises:
        PlanError: a plan breaks the hardware's limits.
        ToolchainError: a compiler failed.
        ValueError: a call's instructions follow no rule, two arrays have one name, an array is compiled and its
            calls are not, or the controller's heap has no room for all.
    """
    calls = calls_of(programs)
    samples: dict[str, dict[ArtifactCall, dict[int, int]]] = {call.array: {} for call in calls}
    for call in calls:
        samples[call.array][call] = _samples(call, _pieced_family) if folder.compiles else {call.last: 0}
    if folder.compiles:
        say(str(_build_cost(samples)))
    array_files: dict[str, str] = {}
    sizes: dict[str, int] = {}  # bytes of each array and call in the controller's heap
    complete = True
    for array, members in samples.items():
        plans: dict[str, Plan] = {}
        for call, positions in members.items():
            report(call)
            plans |= _plans(call, positions)
        folder.add(next(iter(members)).operator, array, plans)
        xclbin, pdi = folder.xclbin(array), folder.pdi(array)
        if xclbin is None or pdi is None:
            complete = False
            continue
        array_files[array] = xclbin
        sizes[array] = (folder.path / xclbin).stat().st_size
        identity = zlib.crc32((folder.path / pdi).read_bytes())
        for call in members:
            family = _family(folder, call, set(members[call]), say)
            write_bytes(folder.path / call.family_file, family.flatten(call.name, identity).tobytes())
            sizes[f"{array} {call.name}"] = max(len(each.words) for each in family.classes) * WORD_BYTES
    _require_room(sizes, LIMITS[folder.target].heap_bytes)
    if complete:
        Index(folder.path, folder.target, emulated=False, programs=programs, array_files=array_files).write()
    return len(folder.compiled)


def _family(folder: ArtifactFolder, call: ArtifactCall, positions: set[int], say: Callable[[str], None]) -> CallFamily:
    """The call's family, derived from compiled `positions`; if that fails, every sample position is compiled."""

    def compiled(position: int) -> NDArray[np.int64]:
        if position not in positions:
            folder.add(call.operator, call.array, _plans(call, [position]))
        file = folder.instructions(call.array, _name(call, position))
        if file is None:
            raise ValueError(
                f"[artifacts] expected instructions of {call.name} in {folder.path}, whose manifest says that "
                "its array is compiled, and found none: build them into a new folder"
            )
        return np.fromfile(folder.path / file, "<u4").astype(np.int64)

    try:
        return _pieced_family(call, compiled)
    except PieceError as error:
        say(f"{call.array} {call.name}: all classes of positions are compiled, for {error}")
        positions |= _samples(call, _whole_family).keys()
        folder.add(call.operator, call.array, _plans(call, positions))
        return _whole_family(call, compiled)


def _whole_family(call: ArtifactCall, compiler: Callable[[int], NDArray[np.int64]]) -> CallFamily:
    """The family, derived from a compiled position of each class."""
    return call.family(compiler, checks=1, lone_chunks=False)


def _pieced_family(call: ArtifactCall, compiler: Callable[[int], NDArray[np.int64]]) -> CallFamily:
    """The family, derived from a few compiled positions.

    Raises:
        PieceError: the compiler's words are not made of pieces that are known.
    """
    if not call.moves:
        return call.family(compiler)
    words = InstructionPieces(call.last_plan.array, lambda position: call.sequence(position).steps, compiler)
    words.compile(call.last)
    family = call.family(words, checks=1, lone_chunks=False)
    left = [position for position in range(call.positions.count) if position not in set(words.compiled)]
    for position in random.Random(0).sample(left, min(_COMPARED, len(left))):  # noqa: S311
        words.compile(position)
    return family


def _require_room(sizes: dict[str, int], heap: int) -> None:
    """Check that arrays and the instructions of each call, in bytes, fit in a session's only heap."""
    if (need := sum(sizes.values())) > heap:
        largest = sorted(sizes, key=sizes.__getitem__, reverse=True)[:_NAMED]
        named = ", ".join(f"{name} {sizes[name]}" for name in largest)
        raise ValueError(
            f"[artifacts] expected arrays and instructions of {heap} bytes or less together, what the controller's "
            f"heap holds, got {need} bytes ({named}): build for a shorter --context"
        )


def _plans(call: ArtifactCall, positions: Iterable[int]) -> dict[str, Plan]:
    return {_name(call, position): call.recorded(position) for position in positions}


def _name(call: ArtifactCall, position: int) -> str:
    return f"{call.name}-position{position}" if call.moves else call.name
