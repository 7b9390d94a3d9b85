# SPDX-License-Identifier: Apache-2.0
"""Products: MatMul and Gemm, nodes that are folded into them, convolutions, weights in 8 bits."""

import math
from functools import partial
from typing import Any

from onnx import TensorProto

from tests.fuzz.graphs.builder import ABSENT, Builder, Value, broadcast
from tests.fuzz.operators import Operators
from tests.fuzz.operators.elementwise import MICROSOFT
from tests.fuzz.reference.pools import windows_of

FLOAT = TensorProto.FLOAT
COLUMNS = (8, 1, 16, 33, 48, 64, 7, 100)


def _columns(b: Builder) -> int:
    return 0 if b.choices.chance(2) else b.choices.pick(COLUMNS)


def matmul(b: Builder) -> None:
    x = b.operand("MatMul", least=1)
    k = x.shape[-1]
    shape: tuple[int, ...] = (k, _columns(b))
    if b.choices.chance(30) and x.rank > 2:  # a product of activations
        shape = (*x.shape[:-2], *shape)
        if b.choices.chance(40):
            shape = (*(1 if b.choices.chance(50) else size for size in shape[:-2]), *shape[-2:])
    elif b.choices.chance(5):
        shape = (k,)
    if math.prod(shape) > 40_000:
        return
    y = b.like(x.type, shape)
    b.node("MatMul", [x, y], [(x.type, _product_shape(x, y))])


def _product_shape(x: Value, y: Value) -> tuple[int, ...]:
    leading = broadcast(x.shape[:-2], y.shape[:-2]) or ()
    rows = x.shape[-2:-1] if x.rank > 1 else ()
    columns = y.shape[-1:] if y.rank > 1 else ()
    return (*leading, *rows, *columns)


def gemm(b: Builder) -> None:
    x = b.operand("Gemm", least=2, most=2, fits=lambda v: v.rank == 2)
    transposed_a, transposed_b = int(b.choices.chance(15)), int(b.choices.chance(50))
    rows, k = x.shape[::-1] if transposed_a else x.shape
    m = _columns(b)
    w = b.like(x.type, (m, k) if transposed_b else (k, m), constant=None if b.choices.chance(30) else True)
    inputs = [x, w]
    if b.opset < 11 or b.choices.chance(60):
        inputs.append(b.like(x.type, b.choices.pick(((m,), (m,), (rows, m), (1, m), (rows, 1), (), (1,), (1, 1)))))
    factors: dict[str, Any] = {
        name: b.choices.pick((0.5, -2.0, 0.0)) for name in ("alpha", "beta") if b.choices.chance(15)
    }
    b.node("Gemm", inputs, [(x.type, (rows, m))], transA=transposed_a or None, transB=transposed_b or None, **factors)


def optimised_gemm(b: Builder) -> None:
    """A graph that ONNX Runtime optimises to one Gemm: transposed operands, their product, a sum, its transpose."""
    x = b.operand("MatMul", least=2, most=2, fits=lambda v: v.type == FLOAT and v.rank == 2)
    if x.type != FLOAT or x.rank != 2:
        return
    if b.choices.chance(50):
        x = _transposed(b, x)
    m = _columns(b)
    k = x.shape[1]
    if b.choices.chance(30):
        w = _transposed(b, b.source(FLOAT, (m, k)))
    else:
        w = b.source(FLOAT, (k, m), constant=None if b.choices.chance(40) else True)
    y = b.node("MatMul", [x, w], [(FLOAT, (x.shape[0], m))])[0]
    if b.choices.chance(70):
        y = _sum(b, y, b.like(FLOAT, b.choices.pick((y.shape, y.shape, (m,), (1, m), (x.shape[0], 1), (1,), ()))))
    if b.choices.chance(30):
        _transposed(b, y)


def _transposed(b: Builder, x: Value) -> Value:
    return b.node("Transpose", [x], [(FLOAT, x.shape[::-1])], perm=[1, 0])[0]


def projection(b: Builder) -> None:
    """MatMul of a constant weight, which may be cast or dequantised, and a possible epilogue: bias, Gelu, residual."""
    x = b.operand("MatMul", least=2, most=3, fits=lambda v: v.type == FLOAT and 0 < v.rank < 5)
    if x.type != FLOAT:
        x = b.source(FLOAT, x.shape)
    k, m = x.shape[-1], _columns(b)
    if k * m > 40_000:
        return
    y = b.node("MatMul", [x, _weight(b, k, m)], [(FLOAT, (*x.shape[:-1], m))])[0]
    if b.choices.chance(60):
        shape = b.choices.pick(((m,), (m,), (1, m), (1, 1, m), (1,), (1, 1, 1, m)))
        bias = b.source(FLOAT, shape, constant=None if b.choices.chance(15) else True)
        y = _sum(b, y, bias)
    if b.choices.chance(40):
        y = _gelu(b, y)
    if b.choices.chance(40):
        shape = y.shape if b.choices.chance(70) else b.choices.pick((y.shape[-1:], (1,), (*y.shape[:-1], 1)))
        _sum(b, y, b.like(FLOAT, shape))


def _sum(b: Builder, y: Value, other: Value) -> Value:
    pair = [y, other] if b.choices.chance(50) else [other, y]
    return b.node("Add", pair, [(FLOAT, broadcast(y.shape, other.shape) or y.shape)])[0]


def _gelu(b: Builder, y: Value) -> Value:
    result = [(FLOAT, y.shape)]
    if b.opset >= 20 and b.choices.chance(60):
        return b.node("Gelu", [y], result, approximate=b.choices.pick(("none", "tanh")))[0]
    return b.node(b.choices.pick(("Gelu", "FastGelu")), [y], result, MICROSOFT)[0]


def _weight(b: Builder, k: int, m: int) -> Value:
    """A float weight [k, m]: a constant, or the Cast, DequantizeLinear or Transpose of one."""
    how = b.choices.pick(("plain", "cast", "dequantise", "plain", "transpose", "four bits"))
    if how == "cast":
        half = b.source(b.choices.pick((TensorProto.FLOAT16, TensorProto.BFLOAT16)), (k, m), constant=True)
        return b.node("Cast", [half], [(FLOAT, (k, m))], to=FLOAT)[0]
    if how == "dequantise" and b.opset >= 13:
        codes = b.source(TensorProto.INT8, (k, m), constant=True)
        axis = b.choices.pick((1, 1, 0))
        scale = b.source(FLOAT, ((k, m)[axis],), constant=True)
        zero = b.source(TensorProto.INT8, scale.shape, constant=True) if b.choices.chance(30) else ABSENT
        return b.node("DequantizeLinear", [codes, scale, zero], [(FLOAT, (k, m))], axis=axis)[0]
    if how == "four bits" and b.opset >= 21:
        kind = b.choices.pick((TensorProto.INT4, TensorProto.UINT4))
        block = b.choices.pick((32, 16, 24, 64, None))
        shape = (-(-k // block), m) if block else (m,)
        scale = b.source(FLOAT, shape, constant=True)
        zero = b.source(kind, shape, constant=True) if b.choices.chance(30) else ABSENT
        codes = b.source(kind, (k, m), constant=True)
        attributes: dict[str, Any] = {"axis": 0, "block_size": block} if block else {"axis": 1}
        return b.node("DequantizeLinear", [codes, scale, zero], [(FLOAT, (k, m))], **attributes)[0]
    if how == "transpose":
        weight = b.source(FLOAT, (m, k), constant=True)
        return b.node("Transpose", [weight], [(FLOAT, (k, m))], perm=[1, 0])[0]
    return b.source(FLOAT, (k, m), constant=True)


def dequantize(b: Builder) -> None:
    x = b.source(b.type_for("DequantizeLinear", "T1" if b.opset >= 19 else "T"), b.shape())
    axis = b.choices.below(x.rank) if x.rank else 0
    kind = FLOAT if b.opset < 19 or not b.choices.chance(10) else TensorProto.FLOAT16
    shape: tuple[int, ...] = (x.shape[axis],) if x.rank and b.opset >= 13 and b.choices.chance(50) else ()
    block = None
    if x.rank and b.opset >= 21 and b.choices.chance(8):
        block = b.choices.pick((2, 4, 16))
        shape = (*x.shape[:axis], -(-x.shape[axis] // block), *x.shape[axis + 1 :])
    if shape == () and b.choices.chance(15):
        shape = (1,)
    scale = b.source(kind, shape)
    zero = b.source(x.type, shape if not b.choices.chance(5) else ()) if b.choices.chance(50) else ABSENT
    if x.type == TensorProto.INT32:
        zero = ABSENT
    result = kind
    output = None
    if b.opset >= 23 and b.choices.chance(10):
        result = output = b.choices.pick((FLOAT, TensorProto.FLOAT16))
    given = None if (axis == 1 and b.choices.chance(50)) or b.opset < 13 or not x.rank else axis
    attributes: dict[str, Any] = {"axis": given, "block_size": block, "output_dtype": output}
    b.node("DequantizeLinear", [x, scale, zero], [(result, x.shape)], **attributes)


def quantize(b: Builder) -> None:
    """A QuantizeLinear, mostly with its DequantizeLinear behind it."""
    x = b.source(FLOAT, b.shape())
    axis = b.choices.below(x.rank) if x.rank else 0
    shape: tuple[int, ...] = (x.shape[axis],) if x.rank and b.opset >= 13 and b.choices.chance(40) else ()
    kind = b.choices.pick((TensorProto.INT8, TensorProto.UINT8))
    scale = b.source(FLOAT, shape)
    zero = b.source(kind, shape) if kind == TensorProto.INT8 or b.choices.chance(50) else ABSENT
    attributes: dict[str, Any] = {"axis": axis if b.opset >= 13 and x.rank else None}
    codes = b.node("QuantizeLinear", [x, scale, zero], [(kind, x.shape)], **attributes)[0]
    if b.choices.chance(70):
        b.node("DequantizeLinear", [codes, scale, zero], [(FLOAT, x.shape)], **attributes)


def dynamic_product(b: Builder) -> None:
    """The nodes that ONNX Runtime's quantize_dynamic writes for a MatMul, or some of them."""
    rows, k, m = b.choices.pick((1, 5, 9)), b.choices.pick((1, 8, 33)), b.choices.pick((1, 4, 40))
    x = b.source(FLOAT, (rows, k))
    byte = (TensorProto.UINT8, ())
    codes, step, zero = b.node("DynamicQuantizeLinear", [x], [(TensorProto.UINT8, (rows, k)), (FLOAT, ()), byte])
    weight = b.source(b.choices.pick((TensorProto.INT8, TensorProto.UINT8)), (k, m), constant=True)
    zeros = b.source(weight.type, (m,), constant=True) if b.choices.chance(30) else ABSENT
    sums = b.node("MatMulInteger", [codes, weight, zero, zeros], [(TensorProto.INT32, (rows, m))])[0]
    if b.choices.chance(20):
        return
    shape = b.choices.pick(((m,), ()))
    factors = b.node("Mul", [step, b.source(FLOAT, shape, constant=True)], [(FLOAT, shape)])[0]
    numbers = b.node("Cast", [sums], [(FLOAT, (rows, m))], to=FLOAT)[0]
    b.node("Mul", [numbers, factors], [(FLOAT, (rows, m))])


def _windows(b: Builder) -> tuple[tuple[int, ...], list[int], dict[str, Any]]:
    """Windows of a convolution: their kernel, the images' sizes and the attributes."""
    axes = b.choices.pick((2, 2, 2, 1, 3))
    kernel = tuple(b.choices.pick((3, 1, 2, 4)) for _ in range(axes))
    sizes = [k * b.choices.pick((1, 2, 3, 5)) + b.choices.pick((0, 0, 1)) for k in kernel]
    given: dict[str, Any] = {"kernel_shape": kernel}
    if b.choices.chance(60):
        given["strides"] = kernel if b.choices.chance(40) else [b.choices.pick((1, 2, 3)) for _ in kernel]
    if b.choices.chance(15):
        given["auto_pad"] = b.choices.pick(("VALID", "SAME_UPPER", "SAME_LOWER"))
    elif b.choices.chance(60):
        given["pads"] = [b.choices.below(size + 1) for size in kernel * 2]
    if b.choices.chance(20):
        given["dilations"] = [b.choices.pick((1, 2)) for _ in kernel]
    return kernel, sizes, given


def convolution(b: Builder, op_type: str) -> None:
    kernel, sizes, attributes = _windows(b)
    space = [max(0, window.count) for window in windows_of(sizes, attributes)]
    group = b.choices.pick((1, 1, 1, 2, 3))
    channels, m = b.choices.pick((3, 1, 4, 8, 20)), b.choices.pick((4, 1, 16, 17, 33))
    images = b.choices.pick((1, 2, 0, 3))
    if b.choices.chance(50):
        del attributes["kernel_shape"]
    if group > 1 or b.choices.chance(10):
        attributes["group"] = group
    x = b.source(FLOAT, (images, channels * group, *sizes), constant=False if b.choices.chance(80) else None)
    weight = b.source(FLOAT, (m * group, channels, *kernel), constant=True if b.choices.chance(90) else None)
    inputs = [x, weight]
    shape = (images, m * group, *space)
    biased = b.choices.chance(60)
    if biased:
        inputs.append(b.source(FLOAT, (m * group if not b.mistake(30) else 1,)))
    if op_type == "FusedConv":
        if b.choices.chance(50):
            inputs += [*([] if biased else [ABSENT]), b.source(FLOAT, shape)]
        attributes["activation"] = "Relu"
        b.node(op_type, inputs, [(FLOAT, shape)], MICROSOFT, **attributes)
        return
    b.node(op_type, inputs, [(FLOAT, shape)], **attributes)


OPERATORS: Operators = [
    (18, "MatMul", 7, matmul),
    (16, "Gemm", 7, gemm),
    (8, "Transpose, MatMul, Add, Transpose", 7, optimised_gemm),
    (26, "MatMul, Add, Gelu, Add", 7, projection),
    (14, "DequantizeLinear", 10, dequantize),
    (9, "QuantizeLinear", 10, quantize),
    (7, "DynamicQuantizeLinear, MatMulInteger", 11, dynamic_product),
    (9, "Conv", 7, partial(convolution, op_type="Conv")),
    (3, "FusedConv", 7, partial(convolution, op_type="FusedConv")),
]
