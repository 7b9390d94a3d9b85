# SPDX-License-Identifier: Apache-2.0
"""Every operator that the CPU device takes, as functions that append one or several nodes to a graph.

A family's list has for each function: its weight, its name, the first opset that has the operator, the function.
"""

from collections.abc import Callable

from tests.fuzz.graphs.builder import Builder

Operators = list[tuple[int, str, int, Callable[[Builder], None]]]
