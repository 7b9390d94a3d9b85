# SPDX-License-Identifier: Apache-2.0
"""Calls of a design through the C++ runtime on the emulator."""

from pathlib import Path
from typing import Any

import numpy as np

from flownpu.aie.emulator import flatten_array
from flownpu.aie.plan.data import DTYPES, Plan
from tests.ops.device import testing

npu = testing.npu
Argument = tuple[Any, int, int]


class Bench:
    """A runtime with one array; `plan`: any call of it."""

    def __init__(self, plan: Plan, folder: Path, *, runtime: Any = None) -> None:
        self.flat = flatten_array(plan.array)
        self.file = str(folder / f"{self.flat.identity}.words")
        self.flat.words.tofile(self.file)
        self.runtime = runtime or npu.open_emulated_runtime(plan.array.target)
        self.array = self.runtime.load(self.file)

    def sequence(self, plan: Plan) -> Any:
        """The words of a call."""
        return self.array.sequence(self.flat.flatten(plan.sequence))

    def buffer(self, content: np.ndarray) -> Any:
        """A buffer whose copies on the host and on the array both have this content."""
        buffer = self.runtime.allocate(content.nbytes)
        buffer.bytes()[:] = content.reshape(-1).view(np.uint8)
        buffer.to_device(0, content.nbytes)
        return buffer

    def buffers(self, plan: Plan, **contents: np.ndarray) -> dict[str, Any]:
        """The call's buffers by name; buffers without given content are full of NaN."""
        return {
            record.name: self.buffer(contents.get(record.name, np.full(record.type.bytes, 0xFF, np.uint8)))
            for record in plan.sequence.buffers
        }

    def run(self, *calls: tuple[Any, list[Argument]], limit: int = 1000) -> None:
        """Runs calls (sequence, arguments) as one dispatch within `limit` ms; they are named call 0, call 1, ..."""
        named = [(f"call {number}", sequence, arguments) for number, (sequence, arguments) in enumerate(calls)]
        self.runtime.run(self.array, named, limit)


def whole(*buffers: Any) -> list[Argument]:
    """Arguments that are whole buffers."""
    return [(buffer, 0, buffer.bytes().size) for buffer in buffers]


def read(buffer: Any, plan: Plan, name: str) -> np.ndarray:
    """The host's copy of the call's buffer `name`, as an array of its dtype."""
    record = next(record for record in plan.sequence.buffers if record.name == name)
    return np.asarray(buffer.bytes().view(DTYPES[record.type.dtype])).copy()
