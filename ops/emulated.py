# SPDX-License-Identifier: Apache-2.0
"""Single operators on the emulated array of an NPU (XDNA2): runs the designs' plans with the NPU's kernels.

The array rounds activations and results to bf16, and sums in float32; its keys and values are bf16. Inputs, attributes
and options that its designs do not support are refused.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from flownpu import _native
from flownpu.ops import q4nx
from flownpu.system import library_file

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from flownpu.aie.emulator import Emulator
    from flownpu.aie.iron.compat import Program
    from flownpu.aie.plan.data import Plan

_TARGET = "npu2"
# The library of the NPU's kernels, compiled for this machine; it lies beside the native module.
_KERNELS = library_file("flownpu_aie_xdna2")
# The fewest rows that the design multiplies: a row of blocks for each tile of a column (aie/designs/fused_dqp.py).
_LEAST_ROWS = 4 * q4nx.BLOCK_ROWS
# The inputs and attributes that the designs of attention support.
_OF_ATTENTION = {
    *("query", "key", "value", "past_key", "past_value", "seqlens_k", "total_sequence_length"),
    *("num_heads", "kv_num_heads", "head_size", "scale", "local_window_size", "causal"),
}


def refuse(function: str, given: Mapping[str, object]) -> None:
    """Raises ValueError if a given input or attribute is neither None nor 0: the array does not support it."""
    for name, value in given.items():
        if value is not None and (not isinstance(value, (int, float)) or value != 0):
            raise ValueError(f"[{function}] expected no {name} with device = 'emulate': the array's design has none")


def project(x: NDArray[Any], blocks: q4nx.Bytes, rows: int, gating: str) -> q4nx.Floats:
    """Multiplies by a weight with the design of FusedDQP, row by row.

    Args:
        x: float32 [.., K].
        blocks: Q4NX blocks of [M, K] in any layout; with gating the gate's and below them the up projection's.
        rows: M.
        gating: "none", "geglu" or "swiglu".

    Returns:
        float32 [.., M], rounded to bf16.

    Raises:
        ValueError: The design does not support these sizes; the message says why.
    """
    columns = x.shape[-1]
    parts = np.split(blocks, 2) if gating != "none" else [blocks]
    padded = max(len(parts[0]) * q4nx.BLOCK_ROWS, _LEAST_ROWS)
    plan = _product(padded, columns, gating, q4nx.layout_of(blocks).unpacked_bits // 4)
    weight = np.concatenate([_wide(part, padded // q4nx.BLOCK_ROWS) for part in parts])
    emulator = _emulator(plan)
    found = []
    for given in x.reshape(-1, columns):
        row = np.zeros(-(-columns // q4nx.WIDE.block_columns) * q4nx.WIDE.block_columns, q4nx.BFLOAT16)
        row[:columns] = given
        y = np.zeros(padded, q4nx.BFLOAT16)
        emulator.run(plan.sequence, [weight, row, y])
        found.append(y[:rows].astype(np.float32))
    return np.array(found, np.float32).reshape(*x.shape[:-1], rows)


def as_read(blocks: q4nx.Bytes) -> q4nx.Bytes:
    """Q4NX blocks of a weight, in any layout, as the array reads them.

    The array multiplies codes of 4 bits. A weight of 8 bits, or with a table of int8 values, is the sum of two of 4,
    its *planes*: of the code or value c, the high one has c // 16 + 8, times 16 scales from -128 scales on, and the low
    one c % 16 (aie/kernels/common/q4nx.h).

    Returns:
        Wide blocks [R, ceil(K/256), 5120]; of 8 bits [R, 2 ceil(K/256), 5120], the high plane's and the low plane's in
        turn.
    """
    layout = q4nx.layout_of(blocks)
    columns = blocks.shape[1] * layout.block_columns  # whole groups
    if layout.unpacked_bits == 4:
        return blocks if layout == q4nx.WIDE else q4nx.repack(blocks, columns, q4nx.WIDE)
    codes, scale, minimum = q4nx.unpack(blocks, len(blocks) * q4nx.BLOCK_ROWS, columns)
    # + 0: rows of padding get 0, not -0.
    wider, least = ((scale.astype(np.float32) * factor + 0).astype(q4nx.BFLOAT16) for factor in (16, -128))
    high = q4nx.pack((codes // 16 + 8).astype(np.uint8), wider, least)
    low = q4nx.pack((codes % 16).astype(np.uint8), scale, minimum)
    return np.stack([high, low], axis=2).reshape(len(high), -1, q4nx.BLOCK_BYTES)


def attend(
    function: str,
    inputs: Mapping[str, Any],
    attributes: Mapping[str, Any],
    present: tuple[NDArray[Any], NDArray[Any]],
) -> q4nx.Floats:
    """Computes attention with the design of FlowKV for one token, of FlowQKV for several.

    Args:
        function: The name that error messages begin with.
        inputs: The operator's inputs by name, already checked.
        attributes: The operator's attributes by name, already checked.
        present: Keys and values [1, G, P, d], those of this call included.

    Returns:
        float32 [1, S, H d], rounded to bf16.

    Raises:
        ValueError: The design does not support an input, an attribute or these sizes.
    """
    refuse(function, {name: value for name, value in {**inputs, **attributes}.items() if name not in _OF_ATTENTION})
    heads, kv_heads, d = (attributes[name] for name in ("num_heads", "kv_num_heads", "head_size"))
    batch, tokens = inputs["query"].shape[:2]
    lengths = inputs.get("seqlens_k")
    total = tokens if lengths is None else int(np.asarray(lengths).reshape(-1)[0]) + 1
    if batch != 1 or tokens < 1 or total < tokens:
        raise ValueError(
            f"[{function}] expected one sequence of one token or more, without padding, with device = 'emulate', "
            f"got {batch} of {tokens}, {total} in all"
        )
    window = attributes.get("local_window_size", -1)
    plan = _attention(
        *(heads, kv_heads, d, tokens, total),
        window=window if window > 0 else None,
        causal=bool(attributes.get("causal", 1)),
        scale=attributes.get("scale") or None,
    )
    query, cache, output = (np.zeros(buffer.type.elements, q4nx.BFLOAT16) for buffer in plan.sequence.buffers)
    given = inputs["query"][0, :, : heads * d].reshape(-1)
    query[: given.size] = given
    rows = cache.reshape(-1, kv_heads, 2, d)
    for place, kept in enumerate(present):
        rows[:total, :, place] = kept[0, :, :total].swapaxes(0, 1)
    _emulator(plan).run(plan.sequence, [query, cache, output])
    return output[: given.size].astype(np.float32).reshape(1, tokens, heads * d)


def _emulator(plan: Plan) -> Emulator:
    from flownpu.aie.emulator import Emulator  # noqa: PLC0415 # the designs take long to import

    return Emulator(plan.array, Path(_native.__file__).parent / _KERNELS)


@lru_cache(maxsize=16)
def _product(rows: int, columns: int, gating: str, planes: int) -> Plan:
    from flownpu.aie.designs.fused_dqp import FusedDQP  # noqa: PLC0415

    padded = -(-columns // q4nx.WIDE.block_columns) * q4nx.WIDE.block_columns
    program = FusedDQP(_TARGET, padded, epilogue=gating).program(rows, columns, planes=planes)
    return _checked(program, "fused_dqp")


@lru_cache(maxsize=16)
def _attention(
    heads: int, kv_heads: int, d: int, tokens: int, total: int, *, window: int | None, causal: bool, scale: float | None
) -> Plan:
    from flownpu.aie.designs.flow_kv import FlowKV  # noqa: PLC0415
    from flownpu.aie.designs.flow_qkv import FlowQKV  # noqa: PLC0415

    if tokens == 1:
        single = FlowKV(_TARGET, heads, kv_heads, d)
        capacity = -(-total // single.keys) * single.keys
        return _checked(single.program(total, capacity, window=window, scale=scale), "flow_kv_attention")
    several = FlowQKV(_TARGET, heads, kv_heads, d)
    capacity = -(-total // several.keys) * several.keys
    program = several.program(tokens, total - tokens, capacity, window=window, causal=causal, scale=scale)
    return _checked(program, "flow_qkv_attention")


def _checked(program: Program, name: str) -> Plan:
    from flownpu.aie.check import require_valid  # noqa: PLC0415

    return require_valid(program.resolve_program(name))


def _wide(blocks: q4nx.Bytes, row_blocks: int) -> q4nx.Bytes:
    """The blocks in the array's layout, padded with rows of zeros to `row_blocks` rows of blocks."""
    wide = as_read(blocks)
    more = row_blocks - len(wide)
    return wide if more <= 0 else np.concatenate([wide, np.zeros((more, *wide.shape[1:]), np.uint8)])
