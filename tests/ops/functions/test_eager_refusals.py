# SPDX-License-Identifier: Apache-2.0
"""Refusals of the operators as functions on arrays: errors name function, argument, expected and given values."""

from typing import Any

import numpy as np
import pytest
import torch

from flownpu import ops
from tests.ops.cpu.attention.conversation import SIZES, D, G, H
from tests.ops.functions.test_eager import weight_and_rows

NAMES = {
    "q4nx_matmul": "Q4NXMatMul",
    "fused_dqp": "FusedDQP",
    "q4nx_gather": "Q4NXGather",
    "flow_qkv_attention": "FlowQKVAttention",
    "flow_kv_attention": "FlowKVAttention",
}
PAIR = {"gating": "geglu"}
BLOCKS, X = weight_and_rows(1)
QUERY = np.zeros((1, 2, (H + 2 * G) * D), np.float32)
REFUSED: dict[str, tuple[str, tuple[Any, ...], dict[str, Any], type[Exception], str]] = {
    "no array": ("q4nx_matmul", ([1.0], BLOCKS), {}, TypeError, r"\[q4nx_matmul\] expected x .* float32 .*, got list"),
    "none": ("fused_dqp", (X, None), {}, TypeError, r"\[fused_dqp\] expected weight to be an array, got None"),
    "type of x": ("q4nx_matmul", (X.astype(np.float64), BLOCKS), {}, TypeError, "expected x of float32, got float64"),
    "order of bytes": ("q4nx_matmul", (X.astype(">f4"), BLOCKS), {}, TypeError, "expected x of float32, got >f4"),
    "objects": ("q4nx_matmul", (X.astype(object), BLOCKS), {}, TypeError, "expected x of float32, got object"),
    "type of torch": ("q4nx_matmul", (torch.zeros(1, 300).double(), BLOCKS), {}, TypeError, "of torch.float64"),
    "sparse": ("q4nx_matmul", (torch.zeros(1, 300).to_sparse(), BLOCKS), {}, TypeError, "x .* the CPU's memory"),
    "no memory": ("q4nx_matmul", (torch.zeros(1, 300, device="meta"), BLOCKS), {}, TypeError, "x .* the CPU's memory"),
    "type of weight": ("q4nx_matmul", (X, BLOCKS.view(np.int8)), {}, TypeError, "weight of uint8, got int8"),
    "width": ("q4nx_matmul", (X[:, :200], BLOCKS), {}, ValueError, r"x's last axis = 257 to 512, .* got 200"),
    "no width": ("q4nx_matmul", (X[:, :0], BLOCKS), {}, ValueError, "x's last axis = 257 to 512, .* got 0"),
    "scalar": ("q4nx_matmul", (X[0, 0], BLOCKS), {}, ValueError, r"x of shape \[.., K\], got \[\]"),
    "axes": ("q4nx_matmul", (X.reshape((1,) * 8 + (300,)), BLOCKS), {}, ValueError, "x of at most 8 axes, got 9"),
    "no blocks": ("q4nx_matmul", (X, BLOCKS[:0]), {}, ValueError, r"weight of shape .*, got \[0, 2, 5120\]"),
    "rank of weight": ("q4nx_matmul", (X, BLOCKS[0]), {}, ValueError, r"weight of shape .*, got \[2, 5120\]"),
    "layout": ("q4nx_matmul", (X, BLOCKS[..., :99]), {}, ValueError, r"weight: .* got \[2, 2, 99\]"),
    "rows": ("q4nx_matmul", (X, BLOCKS), {"rows": 65}, ValueError, r"rows = 33 to 64, .* got 65"),
    "rows of a pair": ("q4nx_matmul", (X, BLOCKS), PAIR | {"rows": 40}, ValueError, "rows = 1 to 32"),
    "half a pair": ("q4nx_matmul", (X, BLOCKS[:1]), PAIR, ValueError, r"an even number .*, got \[1, 2, 5120\]"),
    "rows' type": ("q4nx_matmul", (X, BLOCKS), {"rows": 40.0}, TypeError, "rows to be an integer, got float"),
    "bias": ("q4nx_matmul", (X, BLOCKS), {"bias": X[0, :40]}, ValueError, r"bias of 64 elements, got \[40\]"),
    "residual": ("q4nx_matmul", (X, BLOCKS), {"residual": X[:, :40]}, ValueError, r"residual of shape \[1,64\]"),
    "gating": ("q4nx_matmul", (X, BLOCKS), {"gating": "relu"}, ValueError, "none.geglu.swiglu, got 'relu'"),
    "gating's type": ("q4nx_matmul", (X, BLOCKS), {"gating": 1}, TypeError, "gating to be a str, got int"),
    "unknown": ("q4nx_matmul", (X, BLOCKS), {"gatin": 1}, TypeError, "unexpected keyword argument 'gatin'"),
    "device": (
        "q4nx_matmul",
        (X, BLOCKS),
        {"device": "tpu"},
        ValueError,
        "device = 'cpu' or 'gpu', got 'tpu'",
    ),
    "gather's device": ("q4nx_gather", (BLOCKS, np.zeros(1, np.int64)), {"device": "tpu"}, ValueError, "got 'tpu'"),
    "device's type": ("q4nx_matmul", (X, BLOCKS), {"device": 0}, TypeError, "device to be a str, got int"),
    "option": ("q4nx_matmul", (X, BLOCKS), {"options": {"a": "b"}}, ValueError, "options activations.*, got 'a'"),
    "threads": ("q4nx_matmul", (X, BLOCKS), {"options": {"threads": -1}}, ValueError, "threads = 0 to 1024, got '-1'"),
    "options": ("q4nx_matmul", (X, BLOCKS), {"options": 3}, TypeError, "options to be a dict, got int"),
    "indices' type": ("q4nx_gather", (BLOCKS, X), {}, TypeError, "indices of int64 or int32, got float32"),
    "columns": (
        "q4nx_gather",
        (BLOCKS, np.array([0])),
        {"columns": 256},
        ValueError,
        "columns = 257 to 512, .* got 256",
    ),
    "keyword": ("flow_qkv_attention", (QUERY,), SIZES | {"softcapp": 1}, TypeError, "keywords among .*, got softcapp"),
    "NaN": ("flow_qkv_attention", (QUERY,), SIZES | {"softcap": np.nan}, ValueError, "softcap .*, got nan"),
    "too large": ("flow_qkv_attention", (QUERY,), SIZES | {"scale": 1e300}, ValueError, "scale .*, got 1e.300"),
    "no number": ("flow_qkv_attention", (QUERY,), SIZES | {"scale": "1x"}, TypeError, "scale to be a number, got '1x'"),
    "64 bits": ("flow_qkv_attention", (QUERY,), SIZES | {"num_heads": 2**70}, ValueError, "num_heads .* 64 bits"),
}


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)
def test_call_with_unfit_arguments_is_refused(
    case: tuple[str, tuple[Any, ...], dict[str, Any], type[Exception], str],
) -> None:
    function, arguments, keywords, error, message = case
    with pytest.raises(error, match=message) as raised:
        getattr(ops, function)(*arguments, **keywords)
    assert function in str(raised.value) or NAMES[function] in str(raised.value)
