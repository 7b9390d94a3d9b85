# SPDX-License-Identifier: Apache-2.0
"""The NPU controller's instructions, as mlir-aie writes them for a sequence: a header, then operations in its order.

Source: mlir-aie, lib/Targets/AIETargetNPU.cpp, and a real aie-opt's output for sequences. In 32-bit words:

    header       4   versions and rows; columns; how many operations; bytes in all
    write        6   writes a register: a run-time parameter, a lock, a task for a channel's queue
    block write  4 + n  writes n registers: a descriptor, which has 8
    mask write   7   writes some bits of a register: where a channel's token goes
    sync         4   waits for a channel's token
    patch       12   puts the address of a call's buffer, and an offset, into a descriptor

The low byte of an operation's first word is its code. How many bytes it has is in the last word of a write or mask
write, in the fourth of a block write, and in the second of a sync or patch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from flownpu.aie.plan.data import Await, Free, SetBarrier, Transfer, WriteParameter

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from flownpu.aie.plan.data import Step

    Integers = NDArray[np.int64]

WORD_BYTES = 4
HEADER_WORDS = 4
WRITE, BLOCK_WRITE, MASK_WRITE, SYNC, PATCH = 0, 1, 3, 128, 129
_DESCRIPTOR_WORDS = 8
_WORDS = {WRITE: 6, BLOCK_WRITE: 4 + _DESCRIPTOR_WORDS, MASK_WRITE: 7, SYNC: 4, PATCH: 12}


def operations_of_step(step: Step) -> tuple[int, ...]:
    """The codes of the operations that a step becomes."""
    match step:
        case Transfer():
            return (BLOCK_WRITE, PATCH, *[MASK_WRITE] * step.token, WRITE)
        case Await():
            return (SYNC,)
        case WriteParameter() | SetBarrier():
            return (WRITE,)
        case Free():
            return ()


def words_of_step(step: Step) -> int:
    """How many words a step becomes."""
    return sum(_WORDS[code] for code in operations_of_step(step))


def words_of_steps(steps: Iterable[Step]) -> int:
    """How many words a sequence has."""
    return HEADER_WORDS + sum(map(words_of_step, steps))


def blank(steps: Iterable[Step]) -> Integers:
    """A sequence's instructions, all 0 but the header's counts and the operations' codes, for use without compilers."""
    codes = [code for step in steps for code in operations_of_step(step)]
    words = np.zeros(HEADER_WORDS + sum(_WORDS[code] for code in codes), np.int64)
    words[2], words[3] = len(codes), len(words) * WORD_BYTES
    place = HEADER_WORDS
    for code in codes:
        words[place] = code
        place += _WORDS[code]
    return words


def operations(words: Integers) -> list[tuple[int, Integers]]:
    """The operations of a stream: their codes and words.

    Raises:
        ValueError: the stream has an unknown operation, or does not end where its header says.
    """
    if len(words) < HEADER_WORDS or int(words[3]) != len(words) * WORD_BYTES:
        said = int(words[3]) if len(words) >= HEADER_WORDS else "no header"
        raise ValueError(f"[instructions] expected {len(words) * WORD_BYTES} bytes by the header, got {said}")
    found, place = [], HEADER_WORDS
    while place < len(words):
        code = int(words[place]) & 0xFF
        size = _WORDS.get(code, 0)
        if not size or place + size > len(words):
            raise ValueError(
                f"[instructions] expected an operation of {', '.join(map(str, _WORDS))} at word {place}, got {code}"
            )
        found.append((code, words[place : place + size]))
        place += size
    if int(words[2]) != len(found):
        raise ValueError(f"[instructions] expected {len(found)} operations by the header, got {int(words[2])}")
    return found
