# SPDX-License-Identifier: Apache-2.0
"""Operators with 4-bit weights: MatMulNBits and GatherBlockQuantized of exports, and FlowNPU's own operators."""

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from onnx import TensorProto

from flownpu.ops import definitions, q4nx
from flownpu.ops.definitions.onnx_function import DOMAIN
from tests.fuzz.graphs.builder import ABSENT, Builder, Shape, Value, broadcast, names_of
from tests.fuzz.operators import Operators
from tests.fuzz.operators.elementwise import MICROSOFT

FLOAT, UINT8 = TensorProto.FLOAT, TensorProto.UINT8
ROWS = (8, 1, 16, 32, 33, 64, 100)
COLUMNS = (32, 64, 16, 8, 33, 48, 100, 256, 288)
LAYOUTS = (q4nx.NARROW, q4nx.SYMMETRIC, q4nx.WIDE, q4nx.EIGHT_BITS, q4nx.EIGHT_BITS_WITH_MINIMA, q4nx.TABLE)


def rows_of(b: Builder, columns: int) -> Value:
    """An existing or new float value [.., columns]."""
    found = [v for v in b.values if v.type == FLOAT and v.rank in (2, 3) and v.shape[-1] == columns]
    if found and b.choices.chance(60):
        return b.choices.pick(found)
    leading = b.choices.pick(((3,), (1,), (1, 5), (2, 3), (1, 1), (7,), (), (0, 2)))
    return b.source(FLOAT, (*leading, columns), constant=False if b.choices.chance(85) else None)


def some_rows(b: Builder) -> Value:
    """An existing float value that a product can read, or a new one."""
    found = [v for v in b.values if v.type == FLOAT and v.rank in (2, 3) and 0 < v.shape[-1] <= 320]
    if found and b.choices.chance(50):
        return b.choices.pick(found)
    return rows_of(b, b.choices.pick(COLUMNS))


def block_weight(b: Builder, rows: int, columns: int, block: int, bits: int, *, zero_points: bool) -> list[Value]:
    """Codes, scales and zero points of a weight [rows, columns]."""
    blocks = -(-columns // block)
    rng = np.random.default_rng(b.choices.seed())
    shape = (rows, blocks, block * bits // 8)
    codes = b.source(UINT8, shape, constant=True, given=_bytes(rng, math.prod(shape)))
    # Scales of 4 bits, so that bfloat16 holds -scale * zero point, or of 8 bits scale * (128 - zero point).
    numbers = rng.integers(1, 16, rows * blocks) * 2.0 ** rng.integers(-8, -3, rows * blocks)
    if b.choices.chance(10):
        numbers = numbers * rng.choice([-1.0, 0.0, 1.1], rows * blocks)
    scales = b.source(FLOAT, (rows, blocks), constant=True, given=numbers.tolist())
    zeros = ABSENT
    if zero_points:
        if bits == 8:
            points = rng.integers(113, 144, rows * blocks).tolist()
            zeros = b.source(UINT8, (rows, blocks), constant=True, given=points)
        elif b.choices.chance(12):
            zeros = b.source(FLOAT, (rows, blocks), constant=True)
        else:
            count = -(-blocks // 2)
            zeros = b.source(UINT8, (rows, count), constant=True, given=_bytes(rng, rows * count))
    return [codes, scales, zeros]


def _bytes(rng: np.random.Generator, count: int) -> list[int]:
    numbers: list[int] = rng.integers(0, 256, count).tolist()
    return numbers


def n_bits(b: Builder, x: Value, rows: int, *, plain: bool = False) -> Value:
    """MatMulNBits of x."""
    columns = x.shape[-1]
    block = b.choices.pick((32, 32, 16, 64, 128)) if not plain else 32
    bits = b.choices.pick((4, 4, 8))
    given = block_weight(b, rows, columns, block, bits, zero_points=b.choices.chance(50))
    attributes = {"K": columns, "N": rows, "bits": bits, "block_size": block}
    # With zero points that are no constants, ONNX Runtime's kernel of level 4 gives other numbers in each session.
    if given[-1] == ABSENT:
        attributes["accuracy_level"] = b.choices.pick((None, 4))
    bias = b.source(FLOAT, (rows,), constant=True) if not plain and b.choices.chance(25) else ABSENT
    if b.mistake():
        attributes[b.choices.pick(("K", "N", "block_size", "bits"))] = b.choices.pick((0, 7, 48, -1, 2**40))
    inputs = [x, *given, ABSENT, bias]
    if not plain and b.choices.chance(3):
        inputs[4] = b.source(TensorProto.INT32, (columns,), constant=True, given=[i // block for i in range(columns)])
    return b.node("MatMulNBits", inputs, [(FLOAT, (*x.shape[:-1], rows))], MICROSOFT, **attributes)[0]


def matmul_n_bits(b: Builder) -> None:
    n_bits(b, some_rows(b), b.choices.pick(ROWS))


def matmul_bnb4(b: Builder) -> None:
    """MatMulBnb4, whose codes are places in one of two tables of values."""
    x, rows = some_rows(b), b.choices.pick(ROWS)
    columns, block = x.shape[-1], b.choices.pick((32, 64, 16))
    if rows * columns % 2:
        return
    rng = np.random.default_rng(b.choices.seed())
    count = rows * columns // 2
    codes = b.source(UINT8, (count,), constant=True, given=_bytes(rng, count))
    blocks = -(-rows * columns // block)
    scales = b.source(FLOAT, (blocks,), constant=True, given=rng.uniform(0.01, 2, blocks).tolist())
    attributes = {"K": columns, "N": rows, "block_size": block, "quant_type": b.choices.pick((0, 1))}
    b.node("MatMulBnb4", [x, codes, scales], [(FLOAT, (*x.shape[:-1], rows))], MICROSOFT, **attributes)


def gate_and_up(b: Builder) -> None:
    """Gate and up projection, an activation and their product, which become one product."""
    x, rows = some_rows(b), b.choices.pick(ROWS)
    gate = n_bits(b, x, rows, plain=True)
    up = n_bits(b, x, rows, plain=True)
    result = [(FLOAT, gate.shape)]
    how = b.choices.pick(("sigmoid", "gelu", "fast"))
    if how == "gelu" and b.opset < 20:
        how = "fast"
    if how == "sigmoid":
        sigmoid = b.node("Sigmoid", [gate], result)[0]
        activated = b.node("Mul", [gate, sigmoid] if b.choices.chance(50) else [sigmoid, gate], result)[0]
    elif how == "gelu":
        activated = b.node("Gelu", [gate], result, approximate="tanh")[0]
    else:
        activated = b.node("FastGelu", [gate], result, MICROSOFT)[0]
    product = b.node("Mul", [activated, up] if b.choices.chance(50) else [up, activated], result)[0]
    if b.choices.chance(40):
        n_bits(b, product, b.choices.pick(ROWS), plain=True)


def gather_n_bits(b: Builder) -> None:
    rows, columns = b.choices.pick(ROWS), b.choices.pick((32, 64, 96, 256))
    block = b.choices.pick((32, 16, 32, 64))
    columns = -(-columns // block) * block
    bits = b.choices.pick((4, 4, 8))
    codes, scales, zeros = block_weight(b, rows, columns, block, bits, zero_points=b.choices.chance(50))
    if zeros.type == FLOAT:
        zeros = ABSENT
    if b.choices.chance(30) and b.opset >= 14:
        shape = b.integers([rows, columns * bits // 8], constant=True)
        codes = b.node("Reshape", [codes, shape], [(UINT8, (rows, columns * bits // 8))])[0]
    else:
        b.constants[codes.name] = type(b.constants[codes.name])(
            UINT8, (rows, columns * bits // 8), given=b.constants[codes.name].given
        )
    shape_of = b.choices.pick(((2, 3), (1,), (), (4,), (0,)))
    kind = b.choices.pick((TensorProto.INT64, TensorProto.INT32))
    # No negative indices: FlowNPU refuses GatherBlockQuantized's indices from the end (ops/lowering/q4nx_gather.cc).
    numbers = [b.choices.below(rows) for _ in range(math.prod(shape_of))]
    index = b.integers(numbers, kind, shape=shape_of, constant=b.choices.chance(20))
    attributes = {"bits": bits, "block_size": block, "gather_axis": 0, "quantize_axis": 1}
    if b.choices.chance(5):
        attributes["quantize_axis"] = -1
    result = [(FLOAT, (*index.shape, columns))]
    b.node("GatherBlockQuantized", [codes, index, scales, zeros], result, MICROSOFT, **attributes)


# --- FlowNPU's own ----------------------------------------------------------------------------------------------------


def flow_node(b: Builder, op_type: str, inputs: Sequence[Value], outputs: list[Any], **attributes: Any) -> list[Value]:
    """Appends a node of ai.flownpu, and its function; an invalid node gets the plain variant."""
    operator = definitions.OPERATORS[op_type]
    values: list[ir.Value | None] = [
        ir.Value(name=name, shape=ir.Shape(value.shape)) if name else None
        for name, value in zip(names_of(inputs), inputs, strict=True)
    ]
    while values and values[-1] is None:
        values.pop()
    node = ir.node(op_type, values, {k: v for k, v in attributes.items() if v is not None}, domain=DOMAIN)
    try:
        overload = "_".join(operator.features(node))
    except ValueError:
        overload = ""  # a mistake
    made = b.node(op_type, inputs, outputs, DOMAIN, **attributes)
    b.nodes[-1].overload = overload
    for proto in _functions(op_type, overload):
        b.functions[proto.name, proto.overload] = proto
    return made


@cache
def _functions(op_type: str, overload: str) -> list[onnx.FunctionProto]:
    operator = definitions.OPERATORS[op_type]
    return [ir.to_proto(function) for function in (operator.function(overload), *operator.helpers(overload))]


@cache
def q4nx_blocks(rows: int, columns: int, layout: q4nx.Layout, seed: int, gated: bool = False) -> np.ndarray:
    """Q4NX blocks of random codes, scales and minima."""
    rng = np.random.default_rng(seed)

    def quantized() -> q4nx.Quantized:
        if layout.unpacked_bits == 8:
            found = q4nx.quantize_bytes(rng.uniform(-1, 1, (rows, columns)).astype(np.float32))
            if layout.table:
                found = found._replace(codes=(found.codes // 16 * np.int8(15)))
            return found._replace(minimum=found.scale[::-1] * q4nx.BFLOAT16.type(int(layout.minima) * 5))
        codes = rng.integers(0, 16, (rows, -(-columns // 32) * 32)).astype(np.uint8)
        codes[:, columns:] = 0
        groups = (rows, codes.shape[1] // 32)
        scale = rng.uniform(0.01, 0.1, groups).astype(q4nx.BFLOAT16)
        minimum = (
            rng.uniform(-0.8, 0.1, groups).astype(q4nx.BFLOAT16) if layout.minima else scale * q4nx.BFLOAT16.type(-8)
        )
        return q4nx.Quantized(codes[:, :columns], scale, minimum)

    return q4nx.pack_gated(quantized(), quantized(), layout) if gated else q4nx.pack(*quantized(), layout)


def q4nx_weight(b: Builder, rows: int, columns: int, *, gated: bool = False) -> Value:
    """A Q4NX constant, from one of two seeds only, because packing takes time."""
    layout = b.choices.pick(LAYOUTS)
    blocks = q4nx_blocks(rows, columns, layout, b.choices.below(2), gated)
    return b.source(UINT8, blocks.shape, constant=True, given=blocks.reshape(-1))


def q4nx_matmul(b: Builder) -> None:
    x, rows = some_rows(b), b.choices.pick(ROWS)
    columns = x.shape[-1]
    gating = b.choices.pick((None, None, "geglu", "swiglu", "none"))
    gated = gating in ("geglu", "swiglu")
    result: Shape = (*x.shape[:-1], rows)
    bias = b.source(FLOAT, (rows,), constant=True) if not gated and b.choices.chance(30) else ABSENT
    residual = b.like(FLOAT, result) if b.choices.chance(30) else ABSENT
    one_row = math.prod(x.shape[:-1]) == 1
    op_type = "FusedDQP" if one_row and b.choices.chance(60) else "Q4NXMatMul"
    inputs = [x, q4nx_weight(b, rows, columns, gated=gated), bias, residual]
    m, k = rows, columns
    if b.mistake():
        m, k = b.choices.pick(((rows + 32, columns), (rows, columns + 1), (rows, 2**40), (0, columns)))
    flow_node(b, op_type, inputs, [(FLOAT, result)], M=m, K=k, gating=gating)


def q4nx_gather(b: Builder) -> None:
    rows, columns = b.choices.pick(ROWS), b.choices.pick(COLUMNS)
    shape = b.choices.pick(((2, 3), (1,), (), (4,), (0,)))
    numbers = [b.choices.below(rows) for _ in range(math.prod(shape))]
    index = b.integers(numbers, b.choices.pick((TensorProto.INT64, TensorProto.INT32)), shape=shape)
    result = [(FLOAT, (*index.shape, columns))]
    flow_node(b, "Q4NXGather", [q4nx_weight(b, rows, columns), index], result, M=rows, K=columns)


def q4nx_moe(b: Builder) -> None:
    x, inner, experts = some_rows(b), b.choices.pick((32, 33, 16, 64)), b.choices.pick((3, 1, 2, 4))
    hidden = x.shape[-1]

    def weight(rows: int, columns: int, *, gated: bool) -> Value:
        layout = b.choices.pick(LAYOUTS)
        parts = [q4nx_blocks(rows, columns, layout, seed, gated) for seed in range(experts)]
        blocks = np.concatenate(parts)
        return b.source(UINT8, blocks.shape, constant=True, given=blocks.reshape(-1))

    router = b.source(b.choices.pick((FLOAT, TensorProto.BFLOAT16)), (experts, hidden), constant=True)
    inputs = [x, router, weight(inner, hidden, gated=True), weight(hidden, inner, gated=False)]
    if b.choices.chance(25):
        inputs = [x, ABSENT, *inputs[2:], b.like(FLOAT, (*x.shape[:-1], experts))]
    sizes = {
        "num_experts": experts,
        "experts_per_token": 1 + b.choices.below(experts),
        "hidden_size": hidden,
        "expert_size": inner,
    }
    if b.mistake():
        sizes[b.choices.pick(("num_experts", "hidden_size", "expert_size"))] = b.choices.pick((0, 7, 2**40, -1))
    normalize = b.choices.pick((None, 1, 0))
    gating = b.choices.pick((None, "swiglu", "geglu"))
    scales: dict[str, float] = {}
    if b.choices.chance(25):
        inputs += [ABSENT] * (6 - len(inputs))
        shapes = ((experts, 2 * inner), (experts, hidden), (experts,), (experts,))
        kept = [b.choices.chance(60) and (place != 2 or inputs[1] is not ABSENT) for place in range(len(shapes))]
        inputs += [
            b.source(FLOAT, shape, constant=True) if k else ABSENT for k, shape in zip(kept, shapes, strict=True)
        ]
    if gating != "geglu" and b.choices.chance(25):
        scales = {"swiglu_alpha": 1.7, "swiglu_beta": 1.0, "swiglu_limit": b.choices.pick((0.0, 0.5, 7.0))}
    attributes = {**sizes, "normalize_routing_weights": normalize, "gating": gating, **scales}
    flow_node(b, "Q4NXMoE", inputs, [(FLOAT, x.shape)], **attributes)


def dense_matmul(b: Builder) -> None:
    x, m = some_rows(b), b.choices.pick(ROWS)
    k = x.shape[-1]
    transposed = b.choices.pick((None, 1, 0))
    kind = b.choices.pick((FLOAT, TensorProto.BFLOAT16, TensorProto.FLOAT16, TensorProto.INT8))
    w = b.source(kind, (m, k) if transposed else (k, m), constant=True)
    scaled = kind == TensorProto.INT8 or b.choices.chance(5)
    scale = b.source(FLOAT, (m,), constant=True) if scaled and not transposed else ABSENT
    if transposed and kind == TensorProto.INT8:
        scale = b.source(FLOAT, (m,), constant=True)
    bias = b.source(FLOAT, (m,), constant=True) if b.choices.chance(40) else ABSENT
    result: Shape = (*x.shape[:-1], m)
    residual = ABSENT
    if b.choices.chance(40):
        residual = b.like(FLOAT, result) if b.choices.chance(60) else b.partner(b.like(FLOAT, result))
        result = broadcast(result, residual.shape) or result
    activation = b.choices.pick((None, "gelu", "gelu_tanh", "none"))
    inputs = [x, w, scale, bias, residual]
    flow_node(b, "DenseMatMul", inputs, [(FLOAT, result)], activation=activation, transposed=transposed)


OPERATORS: Operators = [
    (26, "MatMulNBits", 7, matmul_n_bits),
    (8, "MatMulBnb4", 7, matmul_bnb4),
    (18, "gate and up", 7, gate_and_up),
    (16, "GatherBlockQuantized", 7, gather_n_bits),
    (24, "Q4NXMatMul", 21, q4nx_matmul),
    (10, "Q4NXGather", 21, q4nx_gather),
    (10, "Q4NXMoE", 21, q4nx_moe),
    (22, "DenseMatMul", 21, dense_matmul),
]
