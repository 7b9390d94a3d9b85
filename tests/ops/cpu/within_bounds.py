# SPDX-License-Identifier: Apache-2.0
"""Compares a node on the CPU with the bounds that the fuzzers' reference derives, operator by operator."""

from typing import Any

import numpy as np

from tests.fuzz.reference.evaluate import bounds_of_node
from tests.ops.device import run


def check(
    op_type: str, inputs: list[np.ndarray | None], outputs: tuple[str, ...] = ("float",), domain: str = "", **how: Any
) -> None:
    """Runs a node; `how`: its attributes, and the options and constants of tests.ops.device.Node."""
    found = run(op_type, inputs, outputs=outputs, domain=domain, **how)
    for array, bounds in zip(found, bounds_of_node(op_type, inputs, len(outputs), domain=domain, **how), strict=True):
        if array is None:
            continue
        assert bounds is not None
        assert bounds.nan is None
        assert (array.shape, array.dtype) == (bounds.shape, bounds.dtype)
        assert np.all((bounds.low <= array) & (array <= bounds.high))
