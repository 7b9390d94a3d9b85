# SPDX-License-Identifier: Apache-2.0
"""The emulator for Python: an array on which sequences run one after the other.

emulator = Emulator(plan.array, library)
emulator.run(plan.sequence, [w, x, y])  # writes y
emulator.counts()["calls"]
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from flownpu import _native
from flownpu.aie.emulator.flatten import flatten_array
from flownpu.aie.plan.data import DTYPES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

    from flownpu.aie.plan import data as plan


class Emulator:
    """An array as an xclbin would configure it; calls change its memories, locks and cores, nothing resets them.

    Args:
        array: an array in which the checker finds no fault.
        library: the kernels of the array's architecture, compiled for this machine (aie/host/kernel_table.h).
        functions: kernels in Python, by entry: functions of numpy arrays, which they may write, and integers; they
            replace those of the library.

    Raises:
        RuntimeError: a kernel is in neither, or has other parameters.
        ValueError: a function is no kernel of the array.
    """

    def __init__(
        self,
        array: plan.Array,
        library: Path | None = None,
        functions: Mapping[str, Callable[..., None]] | None = None,
    ) -> None:
        self.flat = flatten_array(array)
        kernels = {kernel.entry: kernel for kernel in array.kernels}
        if unknown := set(functions or {}) - set(kernels):
            raise ValueError(f"[emulator] the array calls no kernels {', '.join(sorted(unknown))}")
        given = {entry: _typed(function, kernels[entry]) for entry, function in (functions or {}).items()}
        self._native = _native.Emulator(self.flat.words, "" if library is None else str(library), given)

    def run(
        self,
        sequence: plan.Sequence,
        buffers: Iterable[np.ndarray],
        *,
        seed: int = 0,
        settle: bool = True,
        last: str = "",
    ) -> None:
        """Run one call.

        Args:
            sequence: a sequence for this array.
            buffers: the host buffers in the sequence's order, contiguous, each with as many bytes as the sequence says;
                drains write them.
            seed: which legal order of events; 0 is the cheapest. Results are the same for all, or the plan has a race.
            settle: let everything go on that can before this returns, as if the host's next call came late; False: what
                was not done is still to be done when the next call begins.
            last: the name of a core, such as "core (0, 2)", or of a channel, that goes on only where nothing else can;
                only with a seed other than 0.

        Raises:
            ValueError: a buffer is not contiguous.
            RuntimeError: the program goes wrong: a deadlock (`Deadlock`, with who waits for whom), a transfer outside
                of its buffer, a kernel's access outside of its arguments (`EmulationError`). The emulator cannot be
                used after that.
        """
        spans = [_bytes(buffer) for buffer in buffers]
        self._native.run(self.flat.flatten(sequence), spans, seed, settle, last)

    def counts(self) -> dict[str, dict[str, int]]:
        """Counts of moved words and of calls since the beginning or `reset_counts`.

        Returns:
            "words": 32-bit words by DMA channel; "calls": calls by kernel.
        """
        words, calls = self._native.counts()
        return {"words": words, "calls": calls}

    def reset_counts(self) -> None:
        """Count from 0 again."""
        self._native.reset_counts()

    def leftovers(self) -> list[str]:
        """Errors of calls that have ended: data still under way, objects not taken, cores in the middle of a pass."""
        found: list[str] = self._native.leftovers()
        return found


def _bytes(buffer: np.ndarray) -> np.ndarray:
    if not buffer.flags.c_contiguous:
        raise ValueError("[emulator] expected contiguous host buffers")
    return buffer.reshape(-1).view(np.uint8)


def _typed(function: Callable[..., None], kernel: plan.Kernel) -> Callable[..., None]:
    """The function, given arrays of the kernel's types instead of bytes."""

    def call(*arguments: Any) -> None:
        pairs = zip(arguments, kernel.arguments, strict=True)
        function(*(value.view(DTYPES[kind.dtype]) if kind.shape else value for value, kind in pairs))

    return call
