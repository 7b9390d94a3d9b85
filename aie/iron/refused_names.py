# SPDX-License-Identifier: Apache-2.0
"""The names of `aie.iron` (generation C) that the recorder does not record, each with what to do instead.

A design may import them, as files in the style of upstream's examples do; using one raises an error that says why not.
"""

from __future__ import annotations

from typing import Any, NoReturn

from flownpu.aie.iron.symbolic import RecordingError

__all__ = ["MODULES", "REFUSED", "Refused"]

# The modules of mlir-aie that define these names.
MODULES = ("aie.iron", "aie.iron.dataflow", "aie.iron.controlflow", "aie.iron.device", "aie.helpers.taplib")

_STREAMS = "streams that are no ObjectFifo's: connect the tiles with an ObjectFifo"
_DMA = "hand-written DMA programs: give an ObjectFifo's ends a walk (to_stream, from_stream), or split or join it"
_LATER = (
    "values that a host gives when it calls: record a sequence for each shape, or write a run-time parameter (Buffer)"
)
_BRANCHES = "branches: let a kernel take the decision, or Python where the design knows it"
_HOST = "what runs on the host: the emulator and `flownpu build` take a Program's plan"
_PARTS = "a part of an NPU's columns: use NPU1 or NPU2, and leave the other columns alone"
_KERNELS = "mlir-aie's own kernels: name a source or an object with ExternalFunction or Kernel"
REFUSED = {
    "CascadeFlow": "cascades: hand the partial sums on with an ObjectFifo",
    **dict.fromkeys(("Flow", "PacketFlow", "PacketDest"), _STREAMS),
    **dict.fromkeys(("TileDma", "DmaChannel", "Bd", "Acquire", "Release"), _DMA),
    "Lock": "locks: an ObjectFifo has its own, and a WorkerRuntimeBarrier lets a sequence start a core",
    **dict.fromkeys(("DispatchTime", "ScratchpadParameter", "sync_parameters", "require"), _LATER),
    **dict.fromkeys(("if_", "else_", "yield_"), _BRANCHES),
    **dict.fromkeys(
        ("jit", "In", "Out", "InOut", "CompileTime", "tensor", "zeros", "zeros_like", "ones", "rand", "randint",
         "arange", "set_current_device", "get_current_device"),
        _HOST,
    ),
    **dict.fromkeys(
        [f"NPU1Col{columns}" for columns in range(1, 5)] + [f"NPU2Col{columns}" for columns in range(1, 8)], _PARTS
    ),
    **dict.fromkeys(("kernels", "algorithms"), _KERNELS),
    **dict.fromkeys(
        ("TensorTiler2D", "TensorAccessSequence"),
        "lists of patterns: refine a TensorAccessPattern.full(...) with tile, permute and indices",
    ),
}  # fmt: skip
"""For each name, what a plan does not hold and what to do instead."""


class Refused:
    """A name that may be imported, or a method that exists, but raises a RecordingError when it is used."""

    def __init__(self, name: str, reason: str) -> None:
        self._name, self._reason = name, reason

    def _refuse(self, *_arguments: Any, **_options: Any) -> NoReturn:
        raise RecordingError(f"[{self._name}] a plan does not hold {self._reason}")

    __call__ = __getitem__ = _refuse

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # Python looks these up on any object
            raise AttributeError(name)
        self._refuse()
