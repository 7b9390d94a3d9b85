# SPDX-License-Identifier: Apache-2.0
"""A few operators that FlowNPU's devices do not take, and that therefore cut a graph into partitions."""

import numpy as np
from onnx import TensorProto, helper

from tests.fuzz import arrays
from tests.fuzz.graphs.builder import Builder
from tests.fuzz.operators import Operators
from tests.fuzz.operators.elementwise import unary


def one(b: Builder) -> None:
    unary(b, b.choices.pick(("Asin", "Ceil", "Floor", "Tan")))


def non_zero(b: Builder) -> None:
    """NonZero, whose output's shape is known only when it has run."""
    x = b.source(TensorProto.FLOAT, b.shape(1, 3), constant=False)
    array = b.sources[x.name].array()
    count = int(np.count_nonzero(array))
    places = b.node("NonZero", [x], [(TensorProto.INT64, (x.rank, count))])[0]
    b.node("Cast", [places], [(TensorProto.FLOAT, places.shape)], to=TensorProto.FLOAT)


def constant(b: Builder) -> None:
    kind = b.choices.pick((TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL, TensorProto.FLOAT16))
    shape = b.shape(0, 3)
    array = arrays.Source(kind, shape, b.choices.pick(b.kinds), b.choices.seed()).array()
    b.node("Constant", [], [(kind, shape)], value=helper.make_tensor("value", kind, shape, array.tobytes(), raw=True))


OPERATORS: Operators = [
    (5, "Asin, Ceil, Floor, Tan", 7, one),
    (3, "NonZero", 9, non_zero),
    (8, "Constant", 7, constant),
]
