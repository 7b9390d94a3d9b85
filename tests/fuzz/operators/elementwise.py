# SPDX-License-Identifier: Apache-2.0
"""Element-wise operators: activations, arithmetic, comparisons, casts, selections."""

from functools import partial

from onnx import TensorProto

from tests.fuzz import arrays
from tests.fuzz.graphs import schemas
from tests.fuzz.graphs.builder import ABSENT, Builder, Value, broadcast
from tests.fuzz.operators import Operators

MICROSOFT = "com.microsoft"


def unary(b: Builder, op_type: str, domain: str = "") -> None:
    x = b.operand(op_type, domain=domain)
    b.node(op_type, [x], [(x.type, x.shape)], domain)


def gelu(b: Builder) -> None:
    x = b.operand("Gelu")
    approximate = b.choices.pick(("none", "tanh", None)) if not b.mistake() else "other"
    b.node("Gelu", [x], [(x.type, x.shape)], approximate=approximate)


def fast_gelu(b: Builder) -> None:
    x = b.operand("FastGelu", domain=MICROSOFT, least=1)
    bias = b.like(x.type, x.shape[-1:]) if b.choices.chance(30) else ABSENT
    b.node("FastGelu", [x, bias], [(x.type, x.shape)], MICROSOFT)


def swish(b: Builder, op_type: str, domain: str) -> None:
    x = b.operand("Sigmoid")
    b.node(op_type, [x], [(x.type, x.shape)], domain, alpha=b.choices.pick((None, 1.0, -0.5, 1.702)))


def bias_gelu(b: Builder) -> None:
    x = b.operand("BiasGelu", domain=MICROSOFT, least=1)
    b.node("BiasGelu", [x, b.like(x.type, x.shape[-1:])], [(x.type, x.shape)], MICROSOFT)


def clip(b: Builder) -> None:
    x = b.operand("Clip")
    limits = [b.like(x.type, ()) if b.choices.chance(70) else ABSENT for _ in range(2)]
    b.node("Clip", [x, *limits], [(x.type, x.shape)])


def mod(b: Builder) -> None:
    x = b.operand("Mod")
    y = b.partner(x)
    fmod = 1 if x.type in arrays.FLOATS and not b.mistake() else b.choices.pick((None, 0))
    b.node("Mod", [x, y], [(x.type, broadcast(x.shape, y.shape) or x.shape)], fmod=fmod)


def logical_not(b: Builder) -> None:
    x = b.operand("Not", fits=lambda v: v.type == TensorProto.BOOL)
    b.node("Not", [x], [(TensorProto.BOOL, x.shape)])


def is_nan(b: Builder) -> None:
    x = b.operand("IsNaN", "T1")
    b.node("IsNaN", [x], [(TensorProto.BOOL, x.shape)])


def binary(b: Builder, op_type: str, result: int | None = None) -> None:
    parameter = "T1" if op_type in ("And", "Or", "Xor") else "T"
    x = b.operand(op_type, parameter)
    y = b.partner(x)
    a, c = (x, y) if b.choices.chance(50) else (y, x)
    b.node(op_type, [a, c], [(result or x.type, broadcast(x.shape, y.shape) or x.shape)])


def variadic(b: Builder, op_type: str) -> None:
    """Max and Min take any number of inputs."""
    x = b.operand(op_type)
    values = [x]
    shape = x.shape
    for _ in range(b.choices.pick((1, 1, 1, 0, 2, 3))):
        y = b.partner(x)
        joined = broadcast(shape, y.shape)
        if joined is not None or b.mistake():
            values.append(y)
            shape = joined or shape
    b.node(op_type, values, [(x.type, shape)])


def power(b: Builder) -> None:
    x = b.operand("Pow")
    y = b.partner(x, b.type_for("Pow", "T1") if b.opset >= 12 and b.choices.chance(20) else x.type)
    if b.choices.chance(40):
        y = b.source(x.type, (), constant=True, given=[2])
    b.node("Pow", [x, y], [(x.type, broadcast(x.shape, y.shape) or x.shape)])


def cast(b: Builder) -> None:
    x = b.operand("Cast", "T1")
    to = b.type_for("Cast", "T2")
    if TensorProto.STRING in (x.type, to):
        to = x.type  # conversions between numbers and texts are not tested
    # Only casts to 8-bit floats have this attribute.
    saturate = b.choices.pick((None, 0, 1)) if b.opset >= 19 and to >= TensorProto.FLOAT8E4M3FN else None
    b.node("Cast", [x], [(to, x.shape)], to=to, saturate=saturate)


def cast_to(b: Builder, x: Value, kind: int) -> Value:
    """The value in another type."""
    return b.node("Cast", [x], [(kind, x.shape)], to=kind)[0]


def where(b: Builder) -> None:
    x = b.operand("Where")
    y = b.partner(x)
    shape = broadcast(x.shape, y.shape) or x.shape
    condition = b.like(TensorProto.BOOL, shape)
    if b.choices.chance(50):
        condition = b.partner(condition)
    b.node("Where", [condition, x, y], [(x.type, broadcast(shape, condition.shape) or shape)])


def expand(b: Builder) -> None:
    x = b.operand("Expand")
    target = list(b.partner(x).shape)
    result = broadcast(x.shape, tuple(target)) or x.shape
    if b.mistake():
        target = [b.choices.pick((2**31, 2**62, -1, 0, 3)) for _ in target]
    kind = TensorProto.INT64 if not b.mistake() else TensorProto.INT32
    b.node("Expand", [x, b.integers(target, kind)], [(x.type, result)])


def cast_like(b: Builder) -> None:
    x, like = b.operand("Cast", "T1"), b.operand("Cast", "T1")  # ONNX Runtime has no kernel of CastLike
    b.node("CastLike", [x, like], [(like.type, x.shape)])


def masked_sum(b: Builder) -> None:
    """A mask: a comparison, a Cast of it, and a product with it."""
    x = b.operand("Add", fits=lambda v: v.type in arrays.FLOATS)
    y = b.partner(x)
    shape = broadcast(x.shape, y.shape) or x.shape
    less = b.node("Less", [x, y], [(TensorProto.BOOL, shape)])[0]
    number = cast_to(b, less, x.type)
    b.node("Mul", [number, x], [(x.type, shape)])


UNARY = ("Abs", "Cos", "Exp", "Log", "Neg", "Reciprocal", "Relu", "Sigmoid", "Sin", "Sqrt", "Tanh")
ARITHMETIC = ("Add", "Sub", "Mul", "Div")
COMPARISONS = ("Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual")
LOGIC = ("And", "Or", "Xor")

OPERATORS: Operators = [
    *((5, op_type, 7, partial(unary, op_type=op_type)) for op_type in UNARY),
    *((8, op_type, 7, partial(binary, op_type=op_type)) for op_type in ARITHMETIC),
    *((8, op_type, 8, partial(variadic, op_type=op_type)) for op_type in ("Min", "Max")),
    *(
        (5, op_type, max(7, schemas.first_opset(op_type)), partial(binary, op_type=op_type, result=TensorProto.BOOL))
        for op_type in COMPARISONS
    ),
    *((4, op_type, 7, partial(binary, op_type=op_type, result=TensorProto.BOOL)) for op_type in LOGIC),
    (6, "Pow", 7, power),
    (4, "Not", 7, logical_not),
    (5, "Erf", 9, partial(unary, op_type="Erf")),
    (4, "IsNaN", 9, is_nan),
    (8, "Gelu", 20, gelu),
    (5, "Gelu", 7, partial(unary, op_type="Gelu", domain=MICROSOFT)),
    (7, "FastGelu", 7, fast_gelu),
    (5, "QuickGelu", 7, partial(swish, op_type="QuickGelu", domain=MICROSOFT)),
    (5, "Swish", 24, partial(swish, op_type="Swish", domain="")),
    (5, "BiasGelu", 7, bias_gelu),
    (5, "Clip", 11, clip),
    (4, "Mod", 10, mod),
    (16, "Cast", 7, cast),
    (4, "CastLike", 15, cast_like),
    (8, "Where", 9, where),
    (8, "Expand", 8, expand),
    (5, "masked sum", 7, masked_sum),
]
