# SPDX-License-Identifier: Apache-2.0
"""The stack and the program memory that kernels need of a core, by their sources (kernels/memory.toml)."""

from __future__ import annotations

import tomllib
from functools import cache
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, NamedTuple

from flownpu.aie.plan.limits import NPU2
from flownpu.aie.plan.usage import kernels_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from flownpu.aie.plan.data import Array, Core


class KernelMemory(NamedTuple):
    """Bytes of the stack, and of program memory at least and at most."""

    stack: int
    program: tuple[int, int]


@cache
def _table(target: str) -> dict[str, KernelMemory]:
    file = Path(__file__).parents[1] / "kernels" / "memory.toml"
    entries = tomllib.loads(file.read_text(encoding="utf-8"))
    return {name: KernelMemory(entry["stack"], tuple(entry["program"][target])) for name, entry in entries.items()}


_stem = cache(lambda source: PurePosixPath(source).stem)


def stack_for(sources: Iterable[str]) -> int:
    """Bytes of stack for a core that calls kernels of these sources, such as "flow_qkv"; by default 1024."""
    stacks = [known.stack for source in sources if (known := _table(NPU2.name).get(source))]
    return max(stacks, default=NPU2.stack_bytes)


def core_needs(array: Array, core: Core) -> dict[str, KernelMemory]:
    """By source, the needs of the kernels that a core calls; a source that memory.toml lacks is left out."""
    files = {kernel.entry: _stem(kernel.source) for kernel in array.kernels}
    table = _table(array.target)
    sources = dict.fromkeys(files.get(entry, "") for entry in kernels_of(core))
    return {source: table[source] for source in sources if source in table}
