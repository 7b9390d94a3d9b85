# SPDX-License-Identifier: Apache-2.0
"""Every operator that the CPU device takes, as functions that append a node of it, or a few, to a graph.

A family's list has for each: how often it is taken, its name, the first opset that has it, the function.
"""

from __future__ import annotations

from collections.abc import Callable

from tests.fuzz.graphs.builder import Builder

Operators = list[tuple[int, str, int, Callable[[Builder], None]]]
