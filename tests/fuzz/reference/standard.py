# SPDX-License-Identifier: Apache-2.0
"""Samples of ONNX's operators, and of those of com.microsoft that are functions of them.

onnx's reference implementation computes them in float64: its answer is ONNX's, independent of ONNX Runtime's kernels.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
from onnx import helper
from onnx.reference import ReferenceEvaluator

from flownpu.ops.definitions.dense_matmul import gelu as gelu_by_erf
from tests.fuzz.arrays import Array, is_float, limits, numpy_type
from tests.fuzz.reference.evaluate import Node, Table
from tests.fuzz.reference.samples import Samples, Unknown, each, of, unit
from tests.one_node import one_node

# Roundings of exp, tanh and the like, with the result's: libm's and FlowNPU's are off by up to 2 units in the last
# place (ops/cpu/kernels/functions.h).
FUNCTION_UNITS = 8.0
# An exponential that is below the normal numbers may be anything from 0 up to this.
LEAST = 2.0**-125
# As Slice's `ends` these mean the end of the axis in the slice's direction; one for each integer type.
NO_END = (2**31 - 1, 2**63 - 1)
MOST_NUMBERS = 1 << 20  # of a Range
# Default epsilon of SkipSimplifiedLayerNormalization's schema; that of the other norms is 1e-5.
SKIP_EPSILON = 1e-12


def by_onnx(node: Node, inputs: Sequence[Samples | None] | None = None) -> list[Samples]:
    """The node's outputs by onnx's implementation, without roundings. Raises Unknown for inputs that it refuses."""
    if inputs is None:
        inputs = [node.optional(i) for i in range(node.count)]
    floats = [samples.dtype for samples in inputs if samples is not None and samples.is_float]
    dtype = numpy_type(int(node.attributes["to"])) if node.op_type == "Cast" else (floats or [None])[0]
    attributes = {name: value for name, value in node.attributes.items() if value != []}  # a scalar's perm
    try:
        model, _ = one_node(
            node.op_type,
            [None if samples is None else samples.numbers[0] for samples in inputs],
            [None] * node.outputs,
            opset=node.opset,
            attributes=attributes,
        )
        run = ReferenceEvaluator(model).run

        def once(*arrays: Array | None) -> list[Array]:
            return run(None, {f"x{i}": array for i, array in enumerate(arrays) if array is not None})

        return each(once, inputs, dtype)
    except Exception as error:
        raise Unknown from error


def simple(node: Node, units: float = 0.0, least: float = 0.0) -> list[Samples]:
    """An operator that rounds only its result: integers wrap around."""
    made = by_onnx(node)
    return [samples.rounded(units, least) if samples.is_float else samples for samples in made]


def summed(node: Node, inputs: Sequence[Samples | None], terms: int) -> Samples:
    """An operator that adds up `terms` numbers, in any order, which come from input 0.

    A sum that a computer makes is the exact one of terms that are each off by at most so many roundings (Higham,
    "Accuracy and Stability of Numerical Algorithms", section 4.2). In some orders, partial sums of its finite terms
    overflow, and meet an infinity of the other sign.
    """
    x, *others = inputs
    assert x is not None
    if not x.is_float:
        return by_onnx(node, inputs)[0]
    made = by_onnx(node, [x.shaken((terms + 2) * unit(x.dtype)), *others])[0].rounded()
    sizes = [
        s._replace(numbers=np.nan_to_num(np.abs(s.numbers[:1]), nan=0, posinf=0)) if s is not None and s.is_float else s
        for s in inputs
    ]
    magnitude = by_onnx(node, sizes)[0].numbers[0]
    return made.unknown_where(magnitude > float(limits(x.dtype).max) / 2)


# --- Functions of each element ---------------------------------------------------------------------------------------


def elementwise(
    function: Callable[..., Array], *values: Samples, units: float = 1.0, least: float = 0.0
) -> Samples:  # fmt: skip
    """A function of floats, with `units` roundings."""
    return each(lambda *arrays: [function(*arrays)], values, values[0].dtype)[0].rounded(units, least)


def unary(function: Callable[[Array], Array]) -> Callable[[Node], Samples]:
    return lambda node: elementwise(function, node.float(0), units=FUNCTION_UNITS)


def gelu(x: Samples, *, tanh: bool) -> Samples:
    """GELU: x Phi(x), or its tanh approximation."""

    def exactly(x: Array) -> Array:
        if not tanh:
            return gelu_by_erf(x)
        near = np.clip(x, -1e30, 1e30)
        return x / (1 + np.exp(np.minimum(-2 * np.sqrt(2 / np.pi) * near * (1 + 0.044715 * near * near), 700)))

    made = elementwise(exactly, x, units=FUNCTION_UNITS)
    # Below 0 the value is x times a difference of numbers near 1: absolute errors count. FlowNPU's erf has an
    # error of 1.4e-7 (ops/cpu/kernels/functions.h); tanh's argument is off by some roundings, and so is
    # 1 + tanh. For large x only the error of an exponential that does not overflow is left of tanh's.
    size = np.where(np.isfinite(x.numbers), np.minimum(np.abs(x.numbers), 1e4), 0)
    error = 0.5 * size * (2e-7 + 12 * unit(x.dtype))
    if tanh:
        error = np.where(size > 15, np.minimum(size * 2.0**-125, 1e-9), error)
    # GELU(-inf) is -inf times 0: implementations give NaN or 0, which ONNX leaves open.
    return made.shaken(absolute=error).unknown_where((x.numbers == -np.inf).any(axis=0))


def standard_gelu(node: Node) -> Samples:
    return gelu(node.float(0), tanh=node.attributes.get("approximate", b"none") == b"tanh")


def fast_gelu(node: Node) -> Samples:
    x = node.float(0)
    return gelu(elementwise(np.add, x, node.float(1)) if node.has(1) else x, tanh=True)


def sigmoid(node: Node) -> Samples:
    # Implementations may limit -x before e^-x overflows. ONNX Runtime's kernel is an approximation with an absolute
    # error of 2^-24; with on_unsupported=cpu it may compute a part of the graph.
    least = 2.0**-24 if node.provider.get("on_unsupported") == "cpu" else LEAST
    return elementwise(lambda x: 1 / (1 + np.exp(-x)), node.float(0), units=FUNCTION_UNITS, least=least)


def swish(node: Node) -> Samples:
    """x sigmoid(alpha x), whose factors are each rounded."""
    alpha = np.float32(node.attributes.get("alpha", 1.702 if node.op_type == "QuickGelu" else 1.0))
    x = node.float(0)
    scaled = elementwise(lambda x: alpha * x, x)
    gate = elementwise(lambda x: 1 / (1 + np.exp(-x)), scaled, units=FUNCTION_UNITS, least=2.0**-24)
    return elementwise(np.multiply, x, gate).unknown_where(~np.isfinite(x.numbers).all(axis=0))


def bias_gelu(node: Node) -> Samples:
    return gelu(elementwise(np.add, node.float(0), node.float(1)), tanh=False)


def clip(node: Node) -> Samples:
    """A Clip; with limits that cross, or that are NaN, implementations differ."""
    low, high = node.optional(1), node.optional(2)
    limits_ = [limit.exact() for limit in (low, high) if limit is not None]
    if any(np.isnan(limit).any() for limit in limits_) or (len(limits_) == 2 and (limits_[0] > limits_[1]).any()):
        raise Unknown
    return by_onnx(node)[0]


def mod(node: Node) -> Samples:
    """A Mod, which jumps at each multiple of the divisor; ONNX leaves divisors of 0 open."""
    a, b = node.input(0), node.input(1)
    if a.is_float:
        if len(a.numbers) > 1 or len(b.numbers) > 1 or a.dtype != np.float32:
            raise Unknown
        return elementwise(np.fmod, a, b, units=0)
    if (b.numbers == 0).any():
        raise Unknown
    return by_onnx(node)[0]


def cast_like(node: Node) -> Samples:
    node.attributes["to"] = helper.np_dtype_to_tensor_dtype(node.input(1).dtype)
    return cast(node)


def quotient_of(a: Samples, b: Samples) -> Samples:
    """a / b; unknown where b may be of both signs."""
    signs = np.sign(b.numbers)
    return elementwise(np.divide, a, b).unknown_where(
        np.broadcast_to((signs != signs[0]).any(axis=0), np.broadcast_shapes(a.shape, b.shape))
    )


def divided(node: Node) -> Samples:
    a, b = node.input(0), node.input(1)
    if a.is_float:
        return quotient_of(a, b)
    if (b.numbers == 0).any():
        raise Unknown

    def towards_zero(a: Array, b: Array) -> list[Array]:  # the lowest number divided by -1 wraps around
        with_signs = np.where(b == -1, -a, a // np.where(b == -1, 1, b))
        return [(with_signs + ((a % b != 0) & ((a < 0) != (b < 0)) & (b != -1))).astype(a.dtype)]

    return each(towards_zero, [a, b], None)[0]


def power(node: Node) -> Samples:
    a, b = node.float(0), node.input(1)
    # x^y = exp(y log x): exp turns the absolute error of its argument into a relative error of the result.
    made = each(lambda x, y: [np.power(x, y.astype(np.float64))], [a, b], a.dtype)[0]
    argument = np.abs(np.log(np.maximum(np.abs(made.numbers), 1e-300)))
    made = made.rounded(FUNCTION_UNITS + np.minimum(np.nan_to_num(argument), 1e3))
    # It is monotone in both operands for x > 0 only.
    open_ = ((a.numbers <= 0).any(axis=0) & (a.numbers != a.numbers[0]).any(axis=0)) | (
        (a.numbers <= 0).any(axis=0) & (b.numbers != b.numbers[0]).any(axis=0)
    )
    return made.unknown_where(np.broadcast_to(open_, made.shape))


def equal(node: Node) -> Samples:
    """Equal; operands may also be equal between two samples, of which one is less and one is not."""
    made = by_onnx(node)[0]
    less = each(lambda a, b: [a < b], [node.input(0), node.input(1)], None)[0] if node.input(0).dtype != bool else made
    return made.unknown_where((less.numbers != less.numbers[0]).any(axis=0))


def cast(node: Node) -> Samples:
    """A Cast; numbers that the integer's type does not hold, which ONNX leaves open, become unknown."""
    x, to = node.input(0), numpy_type(int(node.attributes["to"]))
    if to == x.dtype:
        return x
    for dtype in (to, x.dtype):
        if dtype.kind not in "iub" and dtype not in (np.float32, np.float16, np.float64, ml_dtypes.bfloat16):
            raise Unknown
    if is_float(to):
        made = Samples(x.numbers.astype(to).astype(np.float64), to)
        return made if len(x.numbers) == 1 else made.rounded()
    if to == np.bool_ or not x.is_float:
        return Samples(x.numbers.astype(to), to)
    whole, info = np.trunc(x.numbers), limits(to)
    outside = ~((whole >= float(info.min)) & (whole < float(info.max) + 1))
    return Samples(np.where(outside, 0, whole).astype(to), to).unknown_where(outside.any(axis=0))


# --- Moves -----------------------------------------------------------------------------------------------------------


def slice_(node: Node) -> list[Samples]:
    """A Slice as NumPy has its ends. Raises Unknown for lists of several lengths."""
    if node.opset < 10:
        return by_onnx(node)
    places = [node.optional(i) for i in range(1, node.count)]
    starts, ends, axes, steps = [*places, None, None][:4]
    if ends is None or len({place.shape for place in places if place is not None}) > 1:
        raise Unknown
    if steps is not None:
        no_end = (steps.exact() < 0) & np.isin(ends.exact(), NO_END)
        ends = of(np.where(no_end, np.iinfo(ends.dtype).min, ends.exact()))
    return by_onnx(node, [node.input(0), starts, ends, axes, steps])


def unsqueezed(node: Node) -> Samples:
    axes = node.axes()  # in any order, which onnx's implementation does not take
    assert axes is not None
    return node.input(0).map(lambda array: np.expand_dims(array, tuple(axes)))


def range_(node: Node) -> Samples:
    start, limit, delta = (node.input(i).exact().reshape(-1)[0] for i in range(3))
    dtype = node.input(0).dtype
    if delta == 0 or abs((float(limit) - float(start)) / float(delta)) > MOST_NUMBERS:
        raise Unknown
    if not is_float(dtype):
        return of(np.array(range(int(start), int(limit), int(delta)), dtype).reshape(-1))
    count = max(0, int(np.ceil((limit - start) / delta)))  # follows from the rounded quotient
    exact = start + np.arange(count) * delta
    # Elements may be computed by repeated addition or each by a product: up to `count` roundings of the largest.
    return Samples(exact[None], dtype).shaken(absolute=count * 2.0**-23 * np.maximum(abs(start), np.abs(exact)))


# --- Reductions ------------------------------------------------------------------------------------------------------


def _axes(node: Node, since: int) -> tuple[int, ...]:
    x = node.input(0)
    axes = node.axes(since)
    if not axes:
        axes = [] if node.attributes.get("noop_with_empty_axes", 0) else list(range(len(x.shape)))
    places = tuple(axis % max(len(x.shape), 1) for axis in axes)
    if len(set(places)) < len(places):
        raise Unknown
    return places


def reduced(node: Node) -> Samples:
    """ReduceSum, ReduceMean, ReduceMax, ReduceMin; onnx's implementation differs for empty lists of axes."""
    x, mean = node.input(0), node.op_type == "ReduceMean"
    axes = _axes(node, 13 if node.op_type == "ReduceSum" else 18)
    terms = int(np.prod([x.shape[axis] for axis in axes], dtype=np.int64))
    keep = bool(node.attributes.get("keepdims", 1))
    adds = node.op_type == "ReduceSum" or mean
    # ONNX leaves open how a mean of integers is rounded, and, before opset 20, the mean and the largest of nothing.
    is_open = (mean and not x.is_float) or (terms == 0 and node.op_type != "ReduceSum")
    function: Any = np.sum if adds else {"ReduceMax": np.max, "ReduceMin": np.min}[node.op_type]
    if is_open:
        shape = np.zeros(x.shape).sum(axis=axes, keepdims=keep).shape
        return of(np.zeros(shape, x.dtype)).unknown_where(np.ones(shape, bool))
    if adds and not axes and x.is_float:
        return x
    options = {"dtype": x.numbers.dtype} if adds else {}

    def once(array: Array) -> Array:
        return np.asarray(function(array, axis=axes, keepdims=keep, **options))

    if not adds or not x.is_float:
        return x.map(once)
    made = x.shaken((terms + 2) * unit(x.dtype)).map(once)
    magnitude = once(np.abs(x.numbers[0]))
    if mean:
        made = made.map(lambda array: array / terms)
    return made.rounded(2.0).unknown_where((magnitude > float(limits(x.dtype).max) / 2) & np.isfinite(magnitude))


def arg_max(node: Node) -> list[Samples]:
    # ONNX leaves open whether NaN or a number is larger, and there is no largest of no elements.
    if np.isnan(node.input(0).numbers).any() or not node.input(0).shape[node.attributes.get("axis", 0)]:
        raise Unknown
    return by_onnx(node)


def cum_sum(node: Node) -> Samples:
    x, axis = node.input(0), node.input(1).exact().reshape(-1)[0]  # ONNX's is a scalar, ONNX Runtime's also [1]
    return summed(node, [x, of(axis)], x.shape[axis])


def softmax(node: Node) -> Samples:
    """Softmax and LogSoftmax; before opset 13 over all axes from one on."""
    x = node.float(0)
    axis = node.attributes.get("axis", 1 if node.opset < 13 else -1)
    if not x.numbers.size:
        return x
    size = x.shape[axis] if node.opset >= 13 else int(np.prod(x.shape[axis:], dtype=np.int64))

    def less_the_largest(array: Array) -> Array:
        rows = np.moveaxis(array, axis, -1) if node.opset >= 13 else array.reshape(-1, size)
        return rows - rows.max(axis=-1, keepdims=True)

    def as_before(rows: Array) -> Array:
        return np.moveaxis(rows, -1, axis) if node.opset >= 13 else rows.reshape(x.shape)

    def quotient(array: Array) -> Array:
        powers = np.exp(less_the_largest(array))
        return as_before(powers / powers.sum(axis=-1, keepdims=True))

    def logarithm(array: Array) -> Array:
        rows = less_the_largest(array)
        return as_before(rows - np.log(np.exp(rows).sum(axis=-1, keepdims=True)))

    if node.op_type == "Softmax":
        # The exponents are rounded differences; a sum and a quotient follow. Far below the others, one may be 0.
        return x.shaken(2 * unit(x.dtype)).map(quotient).rounded(FUNCTION_UNITS + size, least=1e-36)
    # The logarithm's argument, from 1 to n on, is a sum of n; differences are of the size of the largest number.
    most = np.nan_to_num(np.abs(x.numbers).max(), nan=0, posinf=0)
    return x.map(logarithm).shaken(absolute=unit(x.dtype) * (4 * most + FUNCTION_UNITS + 2 * size)).rounded(2.0)


def norm(node: Node, x: Samples, scale: Samples, *, centred: bool = False, epsilon: float = 1e-5) -> Samples:
    """x / sqrt(mean(x^2) + epsilon) * scale over the last axes, x less its mean if it is centred."""
    if x.dtype != scale.dtype:
        raise Unknown
    axes = tuple(range(node.attributes.get("axis", -1) % len(x.shape), len(x.shape)))
    epsilon = node.attributes.get("epsilon", epsilon)

    def once(x: Array, scale: Array) -> list[Array]:
        x = x - x.mean(axis=axes, keepdims=True) if centred else x
        return [x / np.sqrt((x * x).mean(axis=axes, keepdims=True) + epsilon) * scale]

    terms = int(np.prod([x.shape[axis] for axis in axes]))
    squares = np.square(x.numbers[0]).sum(axis=axes, keepdims=True)
    overflow = np.broadcast_to((squares > 1e37) & np.isfinite(squares), x.shape)
    made = each(once, [x.shaken((terms + 4) * unit(x.dtype)), scale], x.dtype)[0].rounded(FUNCTION_UNITS)
    return made.unknown_where(np.broadcast_to(overflow, made.shape))


def layer_norm(node: Node) -> list[Samples | None]:
    made = norm(node, node.float(0), node.float(1), centred=True)
    return [elementwise(np.add, made, node.float(2)) if node.has(2) else made, None, None]


def group_norm(node: Node) -> Samples:
    """GroupNormalization, GroupNorm and InstanceNormalization."""
    x, scale, bias = (node.float(i) for i in range(3))
    groups = node.attributes.get("num_groups", node.attributes.get("groups", x.shape[1]))
    if len(x.shape) < 3 or 0 in x.shape or x.shape[1] % groups or scale.shape != x.shape[1:2] != bias.shape:
        raise Unknown
    by_channel = (x.shape[1], *[1] * (len(x.shape) - 2))
    rows = Node("", {**node.attributes, "axis": -1}, node.names, node.values, 1, node.opset)
    of_rows = x.map(lambda a: a.reshape(x.shape[0], groups, -1))
    ones = scale.map(lambda a: np.ones((*a.shape[:0], of_rows.shape[-1])))
    made = norm(rows, of_rows, ones, centred=True).map(lambda a: a.reshape(x.shape))
    made = elementwise(np.multiply, made, scale.map(lambda a: a.reshape(by_channel)))
    made = elementwise(np.add, made, bias.map(lambda a: a.reshape(by_channel)))
    if not node.attributes.get("activation"):
        return made
    return elementwise(lambda a: a / (1 + np.exp(-a)), made, units=FUNCTION_UNITS)


def skip_norm(node: Node) -> list[Samples | None]:
    is_of_layer = node.op_type == "SkipLayerNormalization"
    added, bias = elementwise(np.add, node.float(0), node.float(1)), 4 if is_of_layer else 3
    if node.has(bias):
        added = elementwise(np.add, added, node.float(bias))
    made = norm(node, added, node.float(2), centred=is_of_layer, epsilon=SKIP_EPSILON)
    if is_of_layer and node.has(3):
        made = elementwise(np.add, made, node.float(3))
    return [made, None, None, added]


_EXACT = (
    "Less LessOrEqual Greater GreaterOrEqual And Or Xor Not IsNaN Neg Max Min Where Abs Relu Floor Ceil Tile Trilu "
    "GatherElements ScatterElements ScatterND TopK Reshape Squeeze Flatten Transpose Gather GatherND Expand Concat "
    "Split Identity Shape ConstantOfShape Constant"
)
_REDUCTIONS = ("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin")


def resize(node: Node) -> list[Samples]:
    """Linear places are off by some eight roundings of a number up to the longest axis, in either direction."""
    x, made = node.input(0), by_onnx(node)
    if not x.is_float or node.attributes.get("mode", b"nearest") != b"linear":
        return made
    near = np.nan_to_num(np.abs(x.numbers[0]), nan=0, posinf=0)
    for axis in range(near.ndim):  # the largest of a pixel and its neighbours
        ends = np.pad(near, [(1, 1) if i == axis else (0, 0) for i in range(near.ndim)])
        near = np.max([np.take(ends, np.arange(i, i + near.shape[axis]), axis) for i in range(3)], axis=0)
    (size,) = by_onnx(node, [x._replace(numbers=near[None]), *(node.optional(i) for i in range(1, node.count))])
    return [made[0].shaken(absolute=8 * max(made[0].shape, default=1) * unit(x.dtype) * size.numbers[0]).rounded()]


TABLE: Table = {
    **{("", name): simple for name in _EXACT.split()},
    **{("", name): partial(simple, units=1.0) for name in ("Add", "Sub", "Mul", "Sqrt")},
    **{("", name): reduced for name in _REDUCTIONS},
    ("", "Equal"): equal,
    **{("", name): unary(getattr(np, name.lower())) for name in ("Cos", "Exp", "Log", "Sin", "Tanh")},
    ("", "Clip"): clip,
    ("", "Mod"): mod,
    ("", "CastLike"): cast_like,
    ("", "Swish"): swish,
    ("com.microsoft", "QuickGelu"): swish,
    ("com.microsoft", "BiasGelu"): bias_gelu,
    ("", "Erf"): partial(simple, units=FUNCTION_UNITS),
    ("", "Sigmoid"): sigmoid,
    ("", "Reciprocal"): lambda node: quotient_of(of(np.ones(node.float(0).shape, node.float(0).dtype)), node.float(0)),
    ("", "Gelu"): standard_gelu,
    ("com.microsoft", "Gelu"): standard_gelu,
    ("com.microsoft", "FastGelu"): fast_gelu,
    ("", "Div"): divided,
    ("", "Pow"): power,
    ("", "Cast"): cast,
    ("", "Slice"): slice_,
    ("", "Unsqueeze"): unsqueezed,
    ("", "Range"): range_,
    ("", "ArgMax"): arg_max,
    ("", "CumSum"): cum_sum,
    ("", "Softmax"): softmax,
    ("", "LogSoftmax"): softmax,
    ("", "LayerNormalization"): layer_norm,
    **{
        ("", name): lambda node: [norm(node, node.float(0), node.float(1)), None]
        for name in ("SimplifiedLayerNormalization", "RMSNormalization")
    },
    ("com.microsoft", "SkipSimplifiedLayerNormalization"): skip_norm,
    ("com.microsoft", "SkipLayerNormalization"): skip_norm,
    ("", "GroupNormalization"): group_norm,
    ("", "InstanceNormalization"): group_norm,
    ("com.microsoft", "GroupNorm"): group_norm,
    ("", "Resize"): resize,
}
