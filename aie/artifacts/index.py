# SPDX-License-Identifier: Apache-2.0
"""The index of a folder of artifacts: the programs that the host runs, the calls that they make, and their arrays.

    index.words                  the index; written last
    manifest.json                the same for people, with sums and with what each file was made of
    ...                          an array's file: a flat array (emulated.py) or an xclbin (folder.py)
    calls/<array>/<call>.words   a call's words for all positions (programs/call_family.py)

The index (kind INDEX of words/writer.py), which ops/npu/artifacts/index.h reads:

    text target; emulated (0, 1); text identity
    arrays: text name, text file, CRC-32 of the file
    calls: text operator, text name, number of the array, text file, CRC-32 of the file, buffers (text name, bytes)
    the host's calls: text operator, parameters (text name, list), buffers (text name, bytes)
    programs: programs/program.py

`identity` is the sha256 of all files' sums and of the programs: it changes when one of them does. Files are named
relative to the folder.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flownpu.aie.artifacts.folder import digest, write_bytes
from flownpu.aie.programs.call import ArtifactCall
from flownpu.aie.programs.program import attribute_words, calls_of, host_calls_of
from flownpu.aie.words.writer import INDEX, WordWriter

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from flownpu.aie.programs.call import HostCall
    from flownpu.aie.programs.program import Program

_FILE = "index.words"


@dataclass(frozen=True)
class Index:
    """The index of a folder.

    Attributes:
        folder: the folder whose files the index names.
        target: npu1 or npu2.
        emulated: whether the arrays are flat ones for the emulator; if not, they are xclbins.
        programs: the programs that the host may run; their calls' files are in the folder.
        array_files: for each array's name, its file, relative to the folder.
    """

    folder: Path
    target: str
    emulated: bool
    programs: Sequence[Program]
    array_files: Mapping[str, str]

    def write(self) -> None:
        """Writes index.words; all files that it names must be there, since their sums are in it."""
        calls = calls_of(self.programs)
        files = [*self.array_files.values(), *(call.family_file for call in calls)]
        contents = {file: (self.folder / file).read_bytes() for file in files}
        arrays = {name: number for number, name in enumerate(self.array_files)}
        programs = self._programs(calls)
        words = WordWriter()
        words.text(self.target)
        words.add(int(self.emulated))
        sums = "".join(f"{file} {digest(contents[file])}\n" for file in files)
        words.text(digest(f"{sums}programs {programs.identity}\n"))
        words.add(len(arrays))
        for name, file in self.array_files.items():
            words.text(name)
            words.text(file)
            words.add(zlib.crc32(contents[file]))
        words.add(len(calls))
        for call in calls:
            words.text(call.operator)
            words.text(call.name)
            words.add(arrays[call.array])
            words.text(call.family_file)
            words.add(zlib.crc32(contents[call.family_file]))
            _write_buffers(words, call)
        words.append(programs)
        write_bytes(self.folder / _FILE, words.finish(INDEX, words.identity).tobytes())

    def _programs(self, calls: Sequence[ArtifactCall]) -> WordWriter:
        """The words of the host's calls, and of the programs."""
        words, host_calls = WordWriter(), host_calls_of(self.programs)
        words.add(len(host_calls))
        for call in host_calls:
            words.text(call.operator)
            words.add(len(call.parameters))
            for key, value in call.parameters:
                words.text(key)
                words.list(attribute_words(value))
            _write_buffers(words, call)
        places = {(call.array, call.name): number for number, call in enumerate(calls)}
        numbers: dict[ArtifactCall | HostCall, int] = {call: number for number, call in enumerate(host_calls)}
        for step in (step for program in self.programs for step in program.steps):
            if isinstance(step.call, ArtifactCall):
                numbers[step.call] = places[step.call.array, step.call.name]
        words.add(len(self.programs))
        for program in self.programs:
            program.write(words, numbers)
        return words


def _write_buffers(words: WordWriter, call: ArtifactCall | HostCall) -> None:
    words.add(len(call.buffers))
    for buffer in call.buffers:
        words.text(buffer.name)
        words.add(buffer.type.bytes)
