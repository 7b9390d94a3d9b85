# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest

from flownpu.graph_rewrites import testing
from flownpu.graph_rewrites.kv_dtype import set_kv_dtype
from flownpu.ops.definitions.int8_cache import dequantise_rows, quantise_rows
from flownpu.ops.definitions.kv_dtypes import KV_DTYPES, cache_columns

if TYPE_CHECKING:
    from flownpu.graph_rewrites.report import Miss

# H = 4 query heads and G = 2 KV heads of d = 16.
MODEL = """
attention (float[B, S, 128] packed, float[B, 2, past, size] past_key, float[B, 2, past, size] past_value,
           int32[B] seqlens_k, int32 total)
    => (float[B, S, 64] output, float[B, 2, all, size] present_key, float[B, 2, all, size] present_value{also}) {{
    output, present_key, present_value = ai.flownpu.FlowQKVAttention <num_heads = 4, kv_num_heads = 2, head_size = 16>
        (packed, , , {past_key}, past_value, seqlens_k, total)
    {more}
}}
"""
NUMPY = {"bf16": ml_dtypes.bfloat16, "fp16": np.float16, "fp32": np.float32, "int8": np.int8}


def _model(past_key: str = "past_key", also: str = "", more: str = "") -> ir.Model:
    return testing.parse(MODEL.format(past_key=past_key, also=also, more=more))


def _stored(rows: np.ndarray, dtype: str) -> np.ndarray:
    return quantise_rows(rows) if dtype == "int8" else rows.astype(NUMPY[dtype])


def _loaded(rows: np.ndarray) -> np.ndarray:
    return dequantise_rows(rows) if rows.dtype == np.int8 else rows.astype(np.float32)


@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_cache_gets_type_that_is_asked_for(dtype: str) -> None:
    original, model = _model(), _model()
    assert set_kv_dtype(model, dtype) == (1, [])

    caches = [*model.graph.inputs[1:3], *model.graph.outputs[1:3]]
    assert [value.dtype for value in caches] == [KV_DTYPES[dtype]] * 4
    assert [str(value.shape) for value in caches] == [f"[B,2,None,{cache_columns(KV_DTYPES[dtype], 16)}]"] * 4
    assert model.graph.inputs[0].dtype == model.graph.outputs[0].dtype == ir.DataType.FLOAT
    for m in (original, model):
        testing.add_functions(m)
    testing.check(model)

    generator = np.random.default_rng(5)
    feeds = {
        "packed": generator.standard_normal((1, 3, 128), np.float32),
        "past_key": _stored(generator.standard_normal((1, 2, 5, 16), np.float32), dtype),
        "past_value": _stored(generator.standard_normal((1, 2, 5, 16), np.float32), dtype),
        "seqlens_k": np.array([7], np.int32),
        "total": np.array(8, np.int32),
    }
    result = testing.run(model, feeds)
    # The same attention over float32 caches, with new keys and values that `dtype` holds exactly.
    wide = {name: _loaded(array) if name.startswith("past") else array for name, array in feeds.items()}
    wide["packed"] = wide["packed"].copy()
    new = _loaded(_stored(wide["packed"][:, :, 64:].reshape(1, 3, 4, 16), dtype))
    wide["packed"][:, :, 64:] = new.reshape(1, 3, 64)
    expected = testing.run(original, wide)
    np.testing.assert_array_equal(result[0], expected[0])
    for ours, theirs in zip(result[1:], expected[1:], strict=True):
        assert ours.dtype == NUMPY[dtype]
        np.testing.assert_array_equal(_loaded(ours), theirs)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (_model("doubled", more="doubled = Add (past_key, past_key)"), "past (doubled) is not an input of the graph"),
        (
            _model(also=", float copy", more="copy = Identity (past_key)"),
            "past (past_key) is not an input of the graph",
        ),
        (_model(also=", float copy", more="copy = Identity (present_key)"), "present (present_key) is not an output"),
    ],
)
def test_unmatched_graph_reports_miss(model: ir.Model, reason: str) -> None:
    model.graph.sort()
    before = ir.to_proto(model).SerializeToString()
    misses: list[Miss]
    count, misses = set_kv_dtype(model, "bf16")
    assert count == 0
    assert [miss.reason[: len(reason)] for miss in misses] == [reason]
    assert ir.to_proto(model).SerializeToString() == before


def test_unknown_type_lists_known_ones() -> None:
    with pytest.raises(ValueError, match="KV cache type 'int7': expected one of bf16, fp16, fp32, int8"):
        set_kv_dtype(_model(), "int7")
