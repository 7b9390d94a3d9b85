# SPDX-License-Identifier: Apache-2.0
"""int8 KV caches on an OpenCL device: rows as ops/definitions/int8_cache.py has them, written and read by kernels."""

import copy

import numpy as np
import pytest
import torch
import transformers

from flownpu.ops.definitions.int8_cache import dequantise_rows, quantise_rows
from tests.decoding import float32_tolerance
from tests.npu.decoders import Session, read_nodes
from tests.ops.device import _argument, testing
from tests.ops.gpu.test_session import hidden_of

pytestmark = [pytest.mark.opencl, pytest.mark.usefixtures("pocl")]

gpu = testing.gpu
TOKENS = 20


def restored(session, past):
    """A past in which keys and values replace the tickets."""
    kept = [part.copy() for part in past]
    session.device.restore([_argument(part) for part in kept])
    return kept


class Int8Cache(transformers.DynamicCache):
    """transformers' cache, with keys and values rounded as rows of int8, in any precision."""

    def update(self, key, value, *args, **keywords):
        rounded = (torch.from_numpy(dequantise_rows(quantise_rows(each.numpy()))).to(each) for each in (key, value))
        return super().update(*rounded, *args, **keywords)


def logits_in_float64(models, ids, cache):
    """Logits of all tokens, whose keys and values are kept in `cache`."""
    model = copy.deepcopy(models.checkpoint("trained").reference).double()
    with torch.no_grad():
        return model(torch.from_numpy(ids)[None], past_key_values=cache).logits[0].numpy()


def test_int8_session_equals_float64_with_int8_rows(models):
    """A prompt beyond the window of 64, a token, a second prompt and a token: logits of transformers in float64, whose
    keys and values alone are rounded.

    An element near the middle of two codes may get either. Before a layer's keys are rounded, float32 is off by some
    2^-20 of a row's largest, which is 2^-13 of a step on either side of a middle: one code in 2^12 is that near.
    Rounding has a variance of step^2 / 12, and these codes one of step^2 / 2^12, in the rms sqrt(12 / 2^12) = 0.054 of
    what int8 changes; the factor of 4, as in float32_tolerance, makes that 0.22.
    """
    ids = np.random.default_rng(5).integers(3, 250, 101)
    expected, unrounded = (
        logits_in_float64(models, ids, cache) for cache in (Int8Cache(), transformers.DynamicCache())
    )
    session = Session(gpu.SessionDevice(), *read_nodes(models.converted("trained", kv_dtype="int8")))
    hidden, past = hidden_of(models, "trained", ids), session.past(110, np.int8)
    stops = [90, 91, 100, 101]
    lasts = [stop - 1 for stop in stops]
    found = [session.run(hidden[begin:end], end, past)[0] for begin, end in zip([0, *stops[:-1]], stops, strict=True)]
    changed = np.abs(expected[lasts] - unrounded[lasts]).max()
    sizes = session.attributes
    of_float32 = float32_tolerance(expected[lasts], sizes["layers"], sizes["feed_forward.size"])
    assert changed > 4 * of_float32  # so that rounding has a visible effect
    error = np.abs(np.array(found)[:, : expected.shape[1]] - expected[lasts]).max()
    assert error <= of_float32 + 0.22 * changed


def test_appended_rows_have_exact_bytes_of_format(pocl, rng):
    """All bytes of rows, also of numbers that are not finite or tiny. All angles are 0. OpenCL's quotients may be off
    by 2.5 units, which would change a code only where it is that near to a tie."""
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
    kernel = gpu.append_heads(gpu.Heads(heads, kv_heads, size, "int8", 1.0, False, 0.0))
    context = gpu.open(cache=pocl["FLOWNPU_GPU_CACHE"])
    context.run(kernel, [heads + 2, tokens, 1], [packed, cos, sin, query, key, value], [first, past, past, capacity])
    for number, cache in enumerate((key, value)):
        expected = quantise_rows(rows[:, number])
        found = cache[0, past : past + tokens]
        np.testing.assert_array_equal(found[:, :-4], expected[:, :-4])
        scales, of_scales = (np.ascontiguousarray(each[:, -4:]).view(np.float32) for each in (found, expected))
        assert np.isnan(of_scales[3 + number])
        np.testing.assert_array_equal(scales, of_scales)  # any NaN equals any other here
        assert (np.delete(cache, np.arange(past, past + tokens), axis=1) == 7).all()


def test_int8_session_rows_are_rounded_and_restorable(models):
    """The first layer's rows are those of a float32 cache, rounded, since the same kernels made both. Another session
    that goes on from the restored rows gives the same logits."""
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
