# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest

from flownpu.graph_rewrites import testing
from flownpu.graph_rewrites.kv_dtype import set_kv_dtype

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
NUMPY = {"bf16": ml_dtypes.bfloat16, "fp16": np.float16, "fp32": np.float32}


def _model(past_key: str = "past_key", also: str = "", more: str = "") -> ir.Model:
    return testing.parse(MODEL.format(past_key=past_key, also=also, more=more))


@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_cache_is_of_that_type(dtype: str) -> None:
    original, model = _model(), _model()
    assert set_kv_dtype(model, dtype) == (1, [])

    caches = [*model.graph.inputs[1:3], *model.graph.outputs[1:3]]
    assert [value.dtype for value in caches] == [KV_DTYPES[dtype]] * 4
    assert [str(value.shape) for value in caches] == ["[B,2,None,16]"] * 4
    assert model.graph.inputs[0].dtype == model.graph.outputs[0].dtype == ir.DataType.FLOAT
    for m in (original, model):
        testing.add_functions(m)
    testing.check(model)

    generator = np.random.default_rng(5)
    feeds = {
        "packed": generator.standard_normal((1, 3, 128), np.float32),
        "past_key": generator.standard_normal((1, 2, 5, 16), np.float32).astype(NUMPY[dtype]),
        "past_value": generator.standard_normal((1, 2, 5, 16), np.float32).astype(NUMPY[dtype]),
        "seqlens_k": np.array([7], np.int32),
        "total": np.array(8, np.int32),
    }
    result = testing.run(model, feeds)
    # The same attention over float32 caches, when the new keys and values are such as `dtype` holds too.
    wide = {name: array.astype(np.float32) if name.startswith("past") else array for name, array in feeds.items()}
    wide["packed"] = wide["packed"].copy()
    wide["packed"][:, :, 64:] = wide["packed"][:, :, 64:].astype(NUMPY[dtype])
    expected = testing.run(original, wide)
    np.testing.assert_array_equal(result[0], expected[0])
    for ours, theirs in zip(result[1:], expected[1:], strict=True):
        assert ours.dtype == NUMPY[dtype]
        np.testing.assert_array_equal(ours.astype(np.float32), theirs)


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
def test_miss(model: ir.Model, reason: str) -> None:
    model.graph.sort()
    before = ir.to_proto(model).SerializeToString()
    misses: list[Miss]
    count, misses = set_kv_dtype(model, "bf16")
    assert count == 0
    assert [miss.reason[: len(reason)] for miss in misses] == [reason]
    assert ir.to_proto(model).SerializeToString() == before


def test_unknown_type_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match="KV cache type 'int8': expected one of bf16, fp16, fp32"):
        set_kv_dtype(_model(), "int8")
