# SPDX-License-Identifier: Apache-2.0
"""Folders of artifacts, index and families written here word by word, as ops/npu/artifacts.h and call_family.h say."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from flownpu.aie.emulator.words import Words

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np

INDEX, FAMILY = 3, 4  # kinds


@dataclass
class Sweep:
    """As SweepRecord of call_family.h."""

    offset: int = 0
    queries: int = 1
    tokens: int = 1
    window: int = 0


@dataclass
class CallClass:
    """Words of a class of positions; patches: (word, feature, coefficient)."""

    words: list[int]
    tasks: list[int] = field(default_factory=list)
    patches: list[tuple[int, int, int]] = field(default_factory=list)


def family_words(
    classes: list[CallClass],
    sweeps: list[Sweep] | None = None,
    *,
    positions: int = 1,
    keys: int = 1,
    chunks_of_a_task: int = 1,
    name: str = "call",
) -> np.ndarray:
    """A family in flat form."""
    words = Words()
    words.text(name)
    words.add(0, positions, keys, chunks_of_a_task, len(sweeps or []))
    for sweep in sweeps or []:
        words.add(sweep.offset, sweep.queries, sweep.tokens, sweep.window)
    words.add(len(classes))
    for members in classes:
        words.list(members.tasks)
        words.list(members.words)
        words.add(len(members.patches))
        for patch in members.patches:
            words.add(*patch)
    return words.finish(FAMILY, words.identity)


@dataclass
class FolderCall:
    """A call of an index."""

    op_type: str
    name: str
    attributes: dict[str, list[int]]
    family: np.ndarray
    buffers: list[tuple[str, int]] = field(default_factory=list)
    array: int = 0


def write_folder(
    folder: Path, arrays: list[np.ndarray], calls: list[FolderCall], *, target: str = "npu2", emulated: bool = True
) -> Path:
    """Write index.words, arrays/ and calls/; array number n is called array_n."""
    words = Words()
    words.text(target)
    words.add(int(emulated))
    words.text("an identity")
    words.add(len(arrays))
    for number, array in enumerate(arrays):
        words.text(f"array_{number}")
        words.text(f"arrays/array_{number}.words")
        words.add(_write(folder / "arrays" / f"array_{number}.words", array))
    words.add(len(calls))
    for call in calls:
        words.text(call.op_type)
        words.text(call.name)
        words.add(len(call.attributes))
        for key, values in call.attributes.items():
            words.text(key)
            words.list(values)
        words.add(call.array)
        file = f"calls/array_{call.array}/{call.name}.words"
        words.text(file)
        words.add(_write(folder / file, call.family), len(call.buffers))
        for buffer, size in call.buffers:
            words.text(buffer)
            words.add(size)
    _write(folder / "index.words", words.finish(INDEX, words.identity))
    return folder


def _write(path: Path, words: np.ndarray) -> int:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(words.tobytes())
    return zlib.crc32(words.tobytes())
