# SPDX-License-Identifier: Apache-2.0
"""The index of a folder of artifacts, by which the host finds what it calls.

    index.words                  what there is; written last
    manifest.json                the same for people, with sums and with what each file was made of
    ...                          an array's file: a flat array (emulated_artifacts.py) or an xclbin (artifacts.py)
    calls/<array>/<call>.words   a call's words for all positions (call_family.py)

The index (kind INDEX of emulator/words.py), which ops/npu/artifacts.h reads:

    text target; emulated (0, 1); text identity
    arrays: text name, text file, CRC-32 of the file
    calls: text operator, text name, attributes (text key, list), number of the array, text file, CRC-32 of the file,
           buffers (text name, bytes)

`identity` is the sha256 of all files' sums: it changes when one of them does. Files are named relative to the folder.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from flownpu.aie.artifacts import digest, write_bytes
from flownpu.aie.call_family import constant, derive
from flownpu.aie.check_sequence import check_sequence
from flownpu.aie.checker import PlanError, require_valid
from flownpu.aie.emulator.words import INDEX, Words
from flownpu.aie.npu_limits import LIMITS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    from flownpu.aie.call_family import CallFamily, Positions
    from flownpu.aie.iron_compat import Program
    from flownpu.aie.plan import HostBuffer, Plan, Sequence

__all__ = ["ArtifactCall", "Index"]

_FILE = "index.words"


@dataclass(frozen=True)
class ArtifactCall:
    """A call that the host makes, at any position.

    Attributes:
        operator: stem of the design.
        array: name of the array, the same for all calls that share one.
        name: of the call among the array's.
        attributes: what tells it from others of its operator; floats as their bits.
        positions: that its first token may have.
        program: the program at a position.
        moves: whether that depends on the position.
    """

    operator: str
    array: str
    name: str
    attributes: Mapping[str, tuple[int, ...]]
    positions: Positions
    program: Callable[[int], Program]
    moves: bool

    def plan(self, position: int) -> Plan:
        """The plan at a position, checked.

        Raises:
            PlanError: it breaks the hardware's limits.
        """
        return require_valid(self._plan(position))

    def sequence(self, position: int) -> Sequence:
        """The sequence of that plan; only it is checked, each transfer by itself and all in order.

        Raises:
            PlanError: it breaks the hardware's limits.
        """
        plan = self._plan(position)
        if found := check_sequence(plan, LIMITS[plan.array.target]):
            raise PlanError(plan.name, found)
        return plan.sequence

    def _plan(self, position: int) -> Plan:
        return self.program(position).resolve_program(f"{self.array}.{self.name}")

    def family(self, words: Callable[[int], NDArray[np.int64]], **options: Any) -> CallFamily:
        """Its family, of the words at some positions; options: see `derive`."""
        if not self.moves:
            return constant(words(self.last), self.positions.count)
        return derive(words, self.positions, **options)

    @property
    def family_file(self) -> str:
        """Its family's file."""
        return f"calls/{self.array}/{self.name}.words"

    def record(self, buffers: tuple[HostBuffer, ...]) -> dict[str, Any]:
        """What a manifest says of it."""
        return {
            "operator": self.operator,
            "array": self.array,
            "attributes": {key: list(values) for key, values in self.attributes.items()},
            "buffers": [{"name": b.name, "type": str(b.type), "bytes": b.type.bytes} for b in buffers],
        }

    @property
    def last(self) -> int:
        """Its last position, where it has most to do."""
        return self.positions.count - 1


@dataclass
class Index:
    """The index of a folder, call by call.

    Attributes:
        folder: whose files it names.
        target: npu1 or npu2.
        emulated: whether the arrays are flat ones, or xclbins.
    """

    folder: Path
    target: str
    emulated: bool
    _arrays: dict[str, str] = field(default_factory=dict)  # name: file
    _calls: list[tuple[ArtifactCall, tuple[HostBuffer, ...]]] = field(default_factory=list)

    def add(self, call: ArtifactCall, array_file: str, buffers: tuple[HostBuffer, ...]) -> None:
        """A call, the file of its array, and its host buffers in the order of its arguments."""
        self._arrays.setdefault(call.array, array_file)
        self._calls.append((call, buffers))

    def write(self) -> None:
        """Writes it, when all files are there."""
        files = [*self._arrays.values(), *(call.family_file for call, _ in self._calls)]
        contents = {file: (self.folder / file).read_bytes() for file in files}
        numbers = {name: number for number, name in enumerate(self._arrays)}
        words = Words()
        words.text(self.target)
        words.add(int(self.emulated))
        words.text(digest("".join(f"{file} {digest(contents[file])}\n" for file in files)))
        words.add(len(self._arrays))
        for name, file in self._arrays.items():
            words.text(name)
            words.text(file)
            words.add(zlib.crc32(contents[file]))
        words.add(len(self._calls))
        for call, buffers in self._calls:
            words.text(call.operator)
            words.text(call.name)
            words.add(len(call.attributes))
            for key, values in call.attributes.items():
                words.text(key)
                words.list(values)
            words.add(numbers[call.array])
            words.text(call.family_file)
            words.add(zlib.crc32(contents[call.family_file]), len(buffers))
            for buffer in buffers:
                words.text(buffer.name)
                words.add(buffer.type.bytes)
        write_bytes(self.folder / _FILE, words.finish(INDEX, words.identity).tobytes())
