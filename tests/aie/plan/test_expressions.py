# SPDX-License-Identifier: Apache-2.0
"""A core's program computes with integers as numpy does."""

import numpy as np
import pytest

from flownpu.aie.plan.data import Operation, Variable
from flownpu.aie.plan.expressions import evaluate

# In MLIR "%" is arith.remsi, C's remainder, and "//" arith.floordivsi, which rounds down.
NUMPY = {"+": np.add, "-": np.subtract, "*": np.multiply, "//": np.floor_divide, "%": np.fmod}


@pytest.mark.parametrize("name", NUMPY)
def test_operations_equal_numpy(name: str) -> None:
    for left in range(-9, 10):
        for right in (-4, -1, 1, 3, 7):
            value = Operation(name, Variable("left"), Variable("right"))
            assert evaluate(value, {"left": left, "right": right}) == NUMPY[name](left, right), (left, right)
