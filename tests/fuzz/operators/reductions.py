# SPDX-License-Identifier: Apache-2.0
"""Sums and extremes over axes, norms, Softmax."""

import math
from functools import partial
from typing import Any

from onnx import TensorProto

from tests.fuzz import arrays
from tests.fuzz.graphs.builder import ABSENT, Builder, Value, wrapped
from tests.fuzz.operators import Operators
from tests.fuzz.reference.pools import windows_of

FLOAT = TensorProto.FLOAT
MICROSOFT = "com.microsoft"


def reduce_(b: Builder, op_type: str) -> None:
    x = b.operand(op_type)
    axes = sorted({b.choices.below(x.rank) for _ in range(b.choices.pick((1, 1, 2, 3)))}) if x.rank else []
    keep = b.choices.pick((None, 1, 0))
    axes_are_input = b.opset >= (13 if op_type == "ReduceSum" else 18)
    none = b.choices.chance(15)
    noop = b.choices.pick((None, 0, 1)) if axes_are_input else None
    over = list(range(x.rank)) if none or not axes else axes
    if (none or not axes) and noop:
        over = []
    shape = tuple(
        1 if axis in over else size for axis, size in enumerate(x.shape) if axis not in over or keep in (None, 1)
    )
    given = [wrapped(b.choices, axis, x.rank) if b.opset >= 11 else axis for axis in axes]
    result = [(x.type, shape)]
    if not axes_are_input:
        b.node(op_type, [x], result, axes=None if none or not axes else given, keepdims=keep)
        return
    second = ABSENT
    if not none:
        second = b.integers(given)
    elif b.choices.chance(40):
        second = b.integers([])
    b.node(op_type, [x, second], result, keepdims=keep, noop_with_empty_axes=noop)


def arg_max(b: Builder) -> None:
    x = b.operand("ArgMax", least=1)
    axis = b.choices.below(x.rank)
    keep = b.choices.pick((None, 1, 0))
    shape = tuple(1 if i == axis else size for i, size in enumerate(x.shape) if i != axis or keep in (None, 1))
    last = b.choices.pick((None, 0, 1)) if b.opset >= 12 else None
    place = wrapped(b.choices, axis, x.rank) if b.opset >= 11 else axis
    b.node("ArgMax", [x], [(TensorProto.INT64, shape)], axis=place, keepdims=keep, select_last_index=last)


def cum_sum(b: Builder) -> None:
    x = b.operand("CumSum", least=1)
    axis = wrapped(b.choices, b.choices.below(x.rank), x.rank)
    kind = b.choices.pick((TensorProto.INT64, TensorProto.INT32))
    place = b.integers([axis], kind, shape=() if not b.choices.chance(30) else (1,))
    exclusive, reverse = b.choices.pick((None, 1)), b.choices.pick((None, 1))
    b.node("CumSum", [x, place], [(x.type, x.shape)], exclusive=exclusive, reverse=reverse)


def softmax(b: Builder, op_type: str) -> None:
    x = b.operand(op_type, least=1)
    axis = None if b.choices.chance(30) else x.rank - 1 if b.choices.chance(70) else b.choices.below(x.rank)
    given = None if axis is None else wrapped(b.choices, axis, x.rank) if b.opset >= 11 else axis
    b.node(op_type, [x], [(x.type, x.shape)], axis=given)


def _norm_axis(b: Builder, x: Value) -> tuple[int, int | None]:
    """The first axis that is normalised, and the attribute `axis`."""
    if b.choices.chance(15):
        axis = b.choices.below(x.rank)
        return axis, wrapped(b.choices, axis, x.rank)
    return x.rank - 1, b.choices.pick((-1, None, x.rank - 1))


def _scale(b: Builder, x: Value, axis: int, kind: int) -> Value:
    """A norm's scale: mostly of the normalised axes' shape, else one that ONNX broadcasts to them."""
    shape = x.shape[axis:]
    if b.choices.chance(8):
        shape = b.choices.pick(((1,), (1, *shape), ()))
    return b.like(kind, shape)


def layer_norm(b: Builder) -> None:
    x = b.operand("LayerNormalization", least=1)
    axis, given = _norm_axis(b, x)
    inputs = [x, _scale(b, x, axis, x.type)]
    if b.choices.chance(60):
        inputs.append(_scale(b, x, axis, x.type))
    outputs: list[tuple[int, tuple[int, ...]] | None] = [(x.type, x.shape)]
    if b.choices.chance(6):
        outputs.append((FLOAT, (*x.shape[:axis], *([1] * (x.rank - axis)))))
    b.node("LayerNormalization", inputs, outputs, axis=given, **_epsilon(b), stash_type=b.choices.pick((None, 1)))


def _epsilon(b: Builder) -> dict[str, Any]:
    return {"epsilon": b.choices.pick((None, 1e-6, 1e-5, 0.1, 0.0))}


def rms_norm(b: Builder, op_type: str) -> None:
    x = b.operand(op_type, least=1)
    axis, given = _norm_axis(b, x)
    # Scale and result may have another type than x.
    kind = x.type if not b.choices.chance(8) else b.choices.pick(arrays.FLOATS)
    inputs = [x, _scale(b, x, axis, kind)]
    outputs: list[tuple[int, tuple[int, ...]] | None] = [(kind, x.shape)]
    if op_type == "SimplifiedLayerNormalization" and b.choices.chance(5):
        outputs.append((FLOAT, (*x.shape[:axis], *([1] * (x.rank - axis)))))
    b.node(op_type, inputs, outputs, axis=given, **_epsilon(b), stash_type=b.choices.pick((None, 1)))


def skip_norm(b: Builder, op_type: str) -> None:
    """norm(input + skip + bias), and the sum."""
    x = b.operand(op_type, domain=MICROSOFT, least=2)
    if x.rank > 3 and not b.mistake(50):
        x = b.source(FLOAT, b.shape(2, 3))
    skip = b.like(x.type, x.shape)
    if b.choices.chance(8):  # shapes that ONNX Runtime broadcasts
        skip = b.like(x.type, b.choices.pick((x.shape[1:], (1, *x.shape[1:]))))
    bias = b.like(x.type, x.shape[-1:]) if b.choices.chance(10) else ABSENT
    gamma = b.like(x.type, x.shape[-1:])
    beta = (
        [b.like(x.type, x.shape[-1:]) if b.choices.chance(70) else ABSENT]
        if op_type == "SkipLayerNormalization"
        else []
    )
    outputs: list[tuple[int, tuple[int, ...]] | None] = [(x.type, x.shape)]
    if b.choices.chance(50):
        outputs += [None, None, (x.type, x.shape)]
    b.node(op_type, [x, skip, gamma, *beta, bias], outputs, MICROSOFT, **_epsilon(b))


def average(b: Builder) -> None:
    """A mean as in models: ReduceSum, then Div by the count."""
    x = b.operand("ReduceSum", least=1, fits=lambda v: v.type in arrays.FLOATS and math.prod(v.shape) > 0)
    if b.opset >= 13:
        total = b.node("ReduceSum", [x, b.integers([-1])], [(x.type, (*x.shape[:-1], 1))])[0]
    else:
        total = b.node("ReduceSum", [x], [(x.type, (*x.shape[:-1], 1))], axes=[x.rank - 1])[0]
    count = b.source(x.type, (), constant=True, given=[x.shape[-1] if x.rank else 1])
    b.node("Div", [total, count], [(x.type, total.shape)])


def pool(b: Builder, op_type: str) -> None:
    axes = b.choices.pick((2, 2, 2, 1, 3))
    kernel = [b.choices.pick((2, 1, 3, 4)) for _ in range(axes)]
    given: dict[str, Any] = {"kernel_shape": kernel}
    if b.choices.chance(70):
        given["strides"] = kernel if b.choices.chance(50) else [b.choices.pick((1, 2, 3)) for _ in kernel]
    if b.choices.chance(15):
        given["auto_pad"] = b.choices.pick(("VALID", "SAME_UPPER", "SAME_LOWER"))
    elif b.choices.chance(50):
        given["pads"] = [b.choices.below(size) for size in kernel * 2]
    if b.opset >= (10 if op_type == "MaxPool" else 19) and b.choices.chance(30):
        given["dilations"] = [b.choices.pick((1, 2)) for _ in kernel]
    if b.opset >= 10:
        given["ceil_mode"] = b.choices.pick((None, 0, 1))
    if op_type == "AveragePool":
        given["count_include_pad"] = b.choices.pick((None, 0, 1))
    images = [size * b.choices.pick((2, 3, 4)) + b.choices.pick((0, 0, 1)) for size in kernel]
    x = b.source(FLOAT, (b.choices.pick((1, 2)), b.choices.pick((1, 3, 16)), *images))
    given = {name: value for name, value in given.items() if value is not None}
    space = [max(0, window.count) for window in windows_of(images, given)]
    outputs: list[tuple[int, tuple[int, ...]] | None] = [(FLOAT, (*x.shape[:2], *space))]
    if op_type == "MaxPool" and b.opset >= 8 and b.choices.chance(5):
        outputs.append((TensorProto.INT64, (*x.shape[:2], *space)))
    b.node(op_type, [x], outputs, **given)


def global_pool(b: Builder, op_type: str) -> None:
    x = b.source(FLOAT, b.shape(3, 5))
    b.node(op_type, [x], [(FLOAT, (*x.shape[:2], *(1 for _ in x.shape[2:])))])


def group_norm(b: Builder, op_type: str) -> None:
    x = b.source(FLOAT, (b.choices.pick((1, 2, 0)), b.choices.pick((4, 6, 12)), *b.shape(1, 3)))
    weights = [b.source(FLOAT, (x.shape[1] if not b.mistake(5) else 1,)) for _ in range(2)]
    groups = {"GroupNormalization": "num_groups", "GroupNorm": "groups"}.get(op_type)
    attributes: dict[str, Any] = _epsilon(b)
    if groups:
        attributes[groups] = b.choices.pick((2, 1, 3)) if x.shape[1] % 3 == 0 else 2
    if op_type == "GroupNorm":
        attributes |= {"channels_last": 0, "activation": b.choices.pick((0, 1))}
    b.node(op_type, [x, *weights], [(FLOAT, x.shape)], MICROSOFT if op_type == "GroupNorm" else "", **attributes)


def embed_layer_norm(b: Builder) -> None:
    batch, tokens, width = b.choices.pick((1, 2)), b.choices.pick((3, 1, 6)), b.choices.pick((8, 4, 33))
    shape, int32 = (batch, tokens), TensorProto.INT32
    ids = b.integers([b.choices.below(5) for _ in range(batch * tokens)], int32, shape=shape)
    segments = b.integers([b.choices.below(2) for _ in range(batch * tokens)], int32, shape=shape)
    tables = [b.source(FLOAT, (rows, width)) for rows in (5, 7, 2)]
    weights = [b.source(FLOAT, (width,)) for _ in range(2)]
    mask = b.integers([1] * (batch * tokens), int32, shape=shape) if b.choices.chance(50) else ABSENT
    inputs = [ids, segments, *tables, *weights, mask]
    if b.choices.chance(30):
        inputs = [ids, ABSENT, *tables[:2], ABSENT, *weights, mask]
    outputs = [(FLOAT, (*shape, width)), (int32, (batch,))]
    b.node("EmbedLayerNormalization", inputs, outputs, MICROSOFT, **_epsilon(b))


SKIP_NORMS = ("SkipSimplifiedLayerNormalization", "SkipLayerNormalization")
OPERATORS: Operators = [
    *((9, op_type, 7, partial(reduce_, op_type=op_type)) for op_type in ("ReduceSum", "ReduceMean")),
    *((7, op_type, 7, partial(reduce_, op_type=op_type)) for op_type in ("ReduceMax", "ReduceMin")),
    *((7, op_type, 7, partial(pool, op_type=op_type)) for op_type in ("AveragePool", "MaxPool")),
    *((2, op_type, 7, partial(global_pool, op_type=op_type)) for op_type in ("GlobalAveragePool", "GlobalMaxPool")),
    (8, "ArgMax", 7, arg_max),
    (8, "CumSum", 11, cum_sum),
    (10, "Softmax", 7, partial(softmax, op_type="Softmax")),
    (5, "LogSoftmax", 7, partial(softmax, op_type="LogSoftmax")),
    (10, "LayerNormalization", 17, layer_norm),
    (10, "SimplifiedLayerNormalization", 7, partial(rms_norm, op_type="SimplifiedLayerNormalization")),
    (10, "RMSNormalization", 23, partial(rms_norm, op_type="RMSNormalization")),
    *((8, op_type, 7, partial(skip_norm, op_type=op_type)) for op_type in SKIP_NORMS),
    (4, "InstanceNormalization", 7, partial(group_norm, op_type="InstanceNormalization")),
    (4, "GroupNormalization", 21, partial(group_norm, op_type="GroupNormalization")),
    (4, "GroupNorm", 7, partial(group_norm, op_type="GroupNorm")),
    (5, "EmbedLayerNormalization", 7, embed_layer_norm),
    (3, "ReduceSum, Div", 7, average),
]
