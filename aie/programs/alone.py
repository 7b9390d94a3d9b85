# SPDX-License-Identifier: Apache-2.0
"""A program of any calls, one after the other, without a model, for experiments with designs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flownpu.aie.programs.program import BF16_BYTES, Buffer, CacheLayout, Program, ProgramWriter, Role, View

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from flownpu.aie.programs.call import ArtifactCall


def program_of(
    calls: Iterable[ArtifactCall],
    context: int = 0,
    *,
    kind: str = "decode",
    constants: Collection[str] = (),
    same: Mapping[str, str] = {},
    made: str = "",
) -> Program:
    """A program that makes these calls one after the other, each with buffers of its own: "<call> <buffer>".

    Args:
        calls: in their order; the same one may come again.
        context: positions that the calls are for.
        kind: the program's kind.
        constants: buffers that the host fills, by their names in the program.
        same: buffers that share another buffer's memory, as {buffer: other}, by the design's names.
        made: the last call's buffer, bf16, by the design's name, whose elements the host reads; "": it reads none.
    """
    calls = list(calls)
    sizes = {f"{call.name} {buffer.name}": buffer.type.bytes for call in calls for buffer in call.buffers}
    writer = ProgramWriter(Buffer(name, Role.CONSTANT, size) for name, size in sizes.items() if name in constants)
    for call in calls:
        names = (same.get(buffer.name, buffer.name) for buffer in call.buffers)
        writer.step(call, "alone", *(f"{call.name} {name}" for name in names))
    rows = writer.rows(writer.steps[0].views[0], 1, 1)
    last = calls[-1]
    found = None
    if made:
        name = f"{last.name} {made}"
        found = writer.rows(View(name), 1, sizes[name] // BF16_BYTES)
    return Program(kind, {}, 1, 1, context, CacheLayout(), writer.buffers, rows, found, tuple(writer.steps))
