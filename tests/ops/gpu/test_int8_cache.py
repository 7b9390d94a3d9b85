# SPDX-License-Identifier: Apache-2.0
"""int8 KV caches on an OpenCL device: rows as ops/definitions/int8_cache.py has them, written and read by kernels."""

import numpy as np
import pytest

from flownpu.ops.definitions.int8_cache import quantise_rows
from tests.npu.decoders import Session, read_nodes
from tests.ops.device import _argument, testing
from tests.ops.gpu.test_session import hidden_of

pytestmark = [pytest.mark.opencl, pytest.mark.usefixtures("pocl")]

gpu = testing.gpu
TOKENS = 20


def restored(session, past):
    """Keys and values in the place of their tickets."""
    kept = [part.copy() for part in past]
    session.device.restore([_argument(part) for part in kept])
    return kept


def test_rows_are_the_format_s(pocl, rng):
    """All numbers of it, what is not finite and what is next to nothing included. Heads are turned by no angle; a
    quotient that is off by 2.5 units, as OpenCL's may be, would have to be that near to a tie."""
    heads, kv_heads, size, tokens, first, past, capacity = 2, 1, 70, 6, 1, 2, 9
    packed = rng.standard_normal((first + tokens, heads + 2 * kv_heads, size), dtype=np.float32)
    rows = packed[first:, heads:]
    rows[1] = 0
    rows[2] *= 1e-37  # a scale below the smallest normal number
    rows[3, 0, 69], rows[4, 1, 3] = np.nan, -np.inf
    rows[5] *= 1e36
    cos, sin = np.ones((past + tokens, size // 2), np.float32), np.zeros((past + tokens, size // 2), np.float32)
    query = np.zeros((first + tokens, heads * size), np.float32)
    key, value = (np.full((kv_heads, capacity, size + 4), 7, np.int8) for _ in range(2))
    kernel = gpu.append_heads(heads, kv_heads, size, "int8", 1.0, False, 0.0)
    context = gpu.open(cache=pocl["FLOWNPU_GPU_CACHE"])
    context.run(kernel, [heads + 2, tokens, 1], [packed, cos, sin, query, key, value], [first, past, capacity])
    for number, cache in enumerate((key, value)):
        expected = quantise_rows(rows[:, number])
        found = cache[0, past : past + tokens]
        np.testing.assert_array_equal(found[:, :-4], expected[:, :-4])
        scales, of_scales = (np.ascontiguousarray(each[:, -4:]).view(np.float32) for each in (found, expected))
        assert np.isnan(of_scales[3 + number])
        np.testing.assert_array_equal(scales, of_scales)  # a NaN is any
        assert (np.delete(cache, np.arange(past, past + tokens), axis=1) == 7).all()


def test_a_session_s_rows_and_who_goes_on_from_them(models):
    """The first layer's are those of a float32 cache, rounded: the same kernels made both. To another session restored
    rows are somebody else's keys and values, and give the same logits."""
    hidden = hidden_of(models, "trained", np.arange(3, 4 + TOKENS))
    sessions, caches = {}, {}
    for dtype, name in ((np.int8, "int8"), (np.float32, "fp32")):
        sessions[name] = Session(gpu.SessionDevice(), *read_nodes(models.converted("trained", kv_dtype=name)))
        _, past = sessions[name].run(hidden[:TOKENS], TOKENS, sessions[name].past(TOKENS + 8, dtype))
        caches[name] = past
    rows = {name: restored(sessions[name], past) for name, past in caches.items()}
    for part in range(2):
        expected = quantise_rows(rows["fp32"][part][:, :, :TOKENS])
        np.testing.assert_array_equal(rows["int8"][part][:, :, :TOKENS], expected)
        assert not rows["int8"][part][:, :, TOKENS:].any()
    found, _ = sessions["int8"].run(hidden[TOKENS:], TOKENS + 1, caches["int8"])
    other = Session(gpu.SessionDevice(), *read_nodes(models.converted("trained", kv_dtype="int8")))
    again, _ = other.run(hidden[TOKENS:], TOKENS + 1, rows["int8"])
    np.testing.assert_array_equal(again, found)
