# SPDX-License-Identifier: Apache-2.0
"""The parameters of the model of a GEMM, for each generation: rates, bandwidths, costs of a call.

Each has one value for all precisions, sizes and tiles. parameters.toml says what each is, and how it was fitted.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from flownpu.aie.cost.parameters import GEMM_TABLES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from flownpu.aie.cost.parameters import Parameter


@dataclass(frozen=True)
class GemmParameters:
    """The parameters of one generation (`target`: npu1 or npu2), by name."""

    target: str
    table: Mapping[str, Parameter]

    def __getitem__(self, name: str) -> float:
        return self.table[name].value

    def kinds(self, name: str) -> list[str]:
        """The kinds with separate values of a parameter: the second word of its names in the table."""
        return self._kinds.get(name, [])

    @cached_property
    def _kinds(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for name, *kind in (key.split() for key in self.table):
            if kind:
                found.setdefault(name, []).append(kind[0])
        return found


GEMM: dict[str, GemmParameters] = {target: GemmParameters(target, table) for target, table in GEMM_TABLES.items()}


def gemm_parameters(target: str) -> GemmParameters:
    """The parameters of a generation.

    Raises:
        ValueError: there is no such target.
    """
    if target not in GEMM:
        raise ValueError(f"[gemm cost] expected a target of {', '.join(GEMM)}, got {target!r}")
    return GEMM[target]
