# SPDX-License-Identifier: Apache-2.0
"""The operators as functions on arrays, without a graph, a session or ONNX Runtime.

Inputs are NumPy arrays, or arrays of any library that exports DLPack (torch tensors), in the CPU's memory; bfloat16 is
that of `ml_dtypes` or torch. They are read in place where they are dense, else copied, and never changed. Results are
new NumPy arrays. Optional inputs and attributes are keywords by their names in the operator (docs/operators.md).

Every function takes `device`, the device that computes: "cpu" or "gpu" (OpenCL). `options` are the device's, by name:
`activations`, `threads` and `cpu_isa` for the CPU, as the execution provider's (docs/use/options.md); `activations`,
`opencl_device`, `gpu_api`, `gpu_weights`, `gpu_matrices` and `gpu_winograd` for the GPU (docs/gpu.md). Every function
raises TypeError for an argument that is no array or has a type that the operator does not take, and ValueError for
everything else that does not fit. NaN and infinities are not errors; results that depend on them are not finite.
Several threads may call at the same time; the interpreter's lock is released while an operator computes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np

from flownpu.ops import q4nx
from flownpu.ops.contracts import contract_of, documented, input_names
from flownpu.ops.eager_call import ARGUMENTS, argument, as_array, as_integer, compute

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import TypeAlias, Unpack

    from numpy.typing import NDArray

    from flownpu.ops.eager_call import Array

    Options: TypeAlias = Mapping[str, str | int]
    Floats: TypeAlias = NDArray[np.float32]


class AttentionKeywords(TypedDict, total=False):
    """The optional inputs and attributes of attention, for type checkers; `help(flow_qkv_attention)` describes them."""

    past_key: Array | None
    past_value: Array | None
    seqlens_k: Array | None
    total_sequence_length: Array | int | None
    cos_cache: Array | None
    sin_cache: Array | None
    position_ids: Array | None
    attention_bias: Array | None
    q_norm_weight: Array | None
    k_norm_weight: Array | None
    bidirectional_blocks: Array | None
    head_sink: Array | None
    scale: float
    softcap: float
    local_window_size: int
    causal: int
    do_rotary: int
    rotary_interleaved: int
    qk_norm_epsilon: float
    sliding_window_cache: int
    counted_prompt: int


_DEVICE = {
    "device": '"cpu" or "gpu"',
    "options": "the device's options, by name",
}
_ROWS = {
    "rows": "M, the rows of the weight. None: all of the blocks, including the padding of the last block, whose "
    "results are 0"
}


@documented("Q4NXMatMul", _DEVICE | _ROWS, ARGUMENTS)
def q4nx_matmul(
    x: Array,
    weight: Array,
    *,
    rows: int | None = None,
    bias: Array | None = None,
    residual: Array | None = None,
    gating: str = "none",
    device: str = "cpu",
    options: Options | None = None,
) -> Floats:
    """Q4NXMatMul: `x @ dequantize(weight).T (+ bias) (+ residual)`, any number of rows of x.

    Returns:
        float32 [..., M].

    Raises:
        TypeError: An argument is no array, or has another type.
        ValueError: Shapes that do not fit one another; an unknown gating, device or option.
    """
    return _project(
        "q4nx_matmul", "Q4NXMatMul", x, weight, rows, {"bias": bias, "residual": residual}, gating, device, options
    )


@documented("FusedDQP", _DEVICE | _ROWS, ARGUMENTS)
def fused_dqp(
    x: Array,
    weight: Array,
    *,
    rows: int | None = None,
    bias: Array | None = None,
    residual: Array | None = None,
    gating: str = "none",
    device: str = "cpu",
    options: Options | None = None,
) -> Floats:
    """FusedDQP: `q4nx_matmul` of one row: the axes of x before the last are all 1.

    Returns:
        float32 [..., M].

    Raises:
        TypeError: An argument is no array, or has another type.
        ValueError: As in `q4nx_matmul`, or x has more than one row.
    """
    return _project(
        "fused_dqp", "FusedDQP", x, weight, rows, {"bias": bias, "residual": residual}, gating, device, options
    )


@documented("Q4NXGather", _DEVICE | _ROWS | {"columns": "K. None: all columns of the blocks"}, ARGUMENTS)
def q4nx_gather(
    weight: Array,
    indices: Array,
    *,
    rows: int | None = None,
    columns: int | None = None,
    device: str = "cpu",
    options: Options | None = None,
) -> Floats:
    """Q4NXGather: looks up rows of a Q4NX table, as an embedding does.

    Returns:
        float32 [..., K].

    Raises:
        TypeError: An argument is no array, or has another type.
        ValueError: An index outside 0..M-1; rows or columns that are not those of the blocks.
    """
    function = "q4nx_gather"
    blocks = _needed(function, "Q4NXGather", "W", weight)
    layout = _layout(function, blocks)
    sizes = {
        "M": _fit(function, "rows", rows, blocks, blocks.shape[0], q4nx.BLOCK_ROWS),
        "K": _fit(function, "columns", columns, blocks, blocks.shape[1], layout.block_columns),
    }
    inputs = {"W": blocks, "indices": _needed(function, "Q4NXGather", "indices", indices)}
    return compute(function, "Q4NXGather", inputs, sizes, ["float"], device, options)[0]


@documented("FlowQKVAttention", _DEVICE)
def flow_qkv_attention(
    query: Array,
    key: Array | None = None,
    value: Array | None = None,
    *,
    num_heads: int,
    kv_num_heads: int,
    head_size: int,
    device: str = "cpu",
    options: Options | None = None,
    **keywords: Unpack[AttentionKeywords],
) -> tuple[Floats, NDArray[Any], NDArray[Any]]:
    """FlowQKVAttention: attention of S new tokens over the KV cache and themselves.

    B is the batch size, T the number of tokens so far in its longest row (new ones included), H and G the numbers of
    query and KV heads, d the size of a head, P the tokens that the past has room for. The results contain copies of the
    caches with the new keys and values appended. total_sequence_length may be an int.

    Returns:
        output float32 [B, S, H d]; present_key and present_value [B, G, max(P, T), d] (with sliding_window_cache
        [B, G, P, d]) in the past's type, float32 without a past.

    Raises:
        TypeError: An argument is no array, has another type, or is not known.
        ValueError: Shapes, lengths or attributes that do not fit one another; an unknown device or option.
    """
    sizes = {"num_heads": num_heads, "kv_num_heads": kv_num_heads, "head_size": head_size}
    tensors: dict[str, object] = {"query": query, "key": key, "value": value}
    return _attend("flow_qkv_attention", "FlowQKVAttention", tensors, {**keywords, **sizes}, device, options)


@documented("FlowKVAttention", _DEVICE)
def flow_kv_attention(
    query: Array,
    key: Array | None = None,
    value: Array | None = None,
    *,
    num_heads: int,
    kv_num_heads: int,
    head_size: int,
    device: str = "cpu",
    options: Options | None = None,
    **keywords: Unpack[AttentionKeywords],
) -> tuple[Floats, NDArray[Any], NDArray[Any]]:
    """FlowKVAttention: `flow_qkv_attention` of one new token, S = 1, which reads the KV cache once.

    Returns:
        output float32 [B, 1, H d]; present_key and present_value as in `flow_qkv_attention`.

    Raises:
        TypeError: An argument is no array, has another type, or is not known.
        ValueError: As in `flow_qkv_attention`, or there is more than one new token.
    """
    sizes = {"num_heads": num_heads, "kv_num_heads": kv_num_heads, "head_size": head_size}
    tensors: dict[str, object] = {"query": query, "key": key, "value": value}
    return _attend("flow_kv_attention", "FlowKVAttention", tensors, {**keywords, **sizes}, device, options)


def _project(
    function: str,
    op_type: str,
    x: object,
    weight: object,
    rows: object,
    others: dict[str, object],
    gating: str,
    device: str,
    options: Options | None,
) -> Floats:
    activations = _needed(function, op_type, "X", x)
    blocks = _needed(function, op_type, "W", weight)
    layout = _layout(function, blocks)
    row_blocks = blocks.shape[0]
    if gating in ("geglu", "swiglu"):
        if row_blocks % 2:
            raise ValueError(
                f"[{function}] expected weight of an even number of row blocks with gating, the gate's and the up "
                f"projection's, got {list(blocks.shape)}"
            )
        row_blocks //= 2
    if activations.ndim == 0:
        raise ValueError(f"[{function}] expected x of shape [.., K], got []")
    columns = activations.shape[-1]
    _fit(function, "x's last axis", columns, blocks, blocks.shape[1], layout.block_columns)
    attributes = {
        "M": _fit(function, "rows", rows, blocks, row_blocks, q4nx.BLOCK_ROWS),
        "K": columns,
        "gating": gating,
    }
    inputs = {"X": activations, "W": blocks, **others}
    return compute(function, op_type, inputs, attributes, ["float"], device, options)[0]


def _attend(
    function: str,
    op_type: str,
    tensors: Mapping[str, object],
    keywords: dict[str, object],
    device: str,
    options: Options | None,
) -> tuple[Floats, NDArray[Any], NDArray[Any]]:
    names = input_names(op_type)
    attributes = [rule.name for rule in contract_of(op_type).attributes]
    if unknown := [name for name in keywords if name not in names and name not in attributes]:
        raise TypeError(f"[{function}] expected keywords among {', '.join([*names, *attributes])}, got {unknown[0]}")
    total = keywords.get("total_sequence_length")
    if isinstance(total, (int, np.integer)):
        keywords["total_sequence_length"] = np.array(as_integer(function, "total_sequence_length", total, 32), np.int32)
    inputs = {**tensors, **{name: keywords[name] for name in names if name in keywords}}
    inputs["query"] = _needed(function, op_type, "query", inputs["query"])
    past = inputs["past_key"] = as_array(function, op_type, "past_key", inputs.get("past_key"))
    if past is not None and inputs.get("seqlens_k") is None:
        raise ValueError(f"[{function}] expected seqlens_k and total_sequence_length with past_key, got none")
    kind = "float" if past is None else "float" if past.dtype == np.float32 else past.dtype.name
    given = {name: keywords[name] for name in attributes if name in keywords}
    output, key, value = compute(function, op_type, inputs, given, ["float", kind, kind], device, options)
    return output, key, value


def _needed(function: str, op_type: str, name: str, value: object) -> NDArray[Any]:
    array = as_array(function, op_type, name, value)
    if array is None:
        raise TypeError(f"[{function}] expected {argument(name)} to be an array, got None")
    return array


def _layout(function: str, blocks: NDArray[Any]) -> q4nx.Layout:
    """The layout of a weight's blocks. Raises ValueError for another shape, or a weight without blocks."""
    if blocks.ndim != 3 or blocks.size == 0:
        raise ValueError(
            f"[{function}] expected weight of shape [row blocks, column blocks, bytes of a block], "
            f"got {list(blocks.shape)}"
        )
    try:
        return q4nx.layout_of(blocks)
    except ValueError as error:
        raise ValueError(f"[{function}] weight: {error}") from None


def _fit(function: str, name: str, given: object, weight: NDArray[Any], blocks: int, each: int) -> int:
    """The given size, by default that of `blocks` blocks of `each`; ValueError if it needs another number of blocks."""
    most = blocks * each
    size = most if given is None else as_integer(function, name, given, 64)
    if not most - each < size <= most:
        raise ValueError(
            f"[{function}] expected {name} = {most - each + 1} to {most}, which weight {list(weight.shape)} holds, "
            f"got {size}"
        )
    return size
