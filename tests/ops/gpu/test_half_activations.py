# SPDX-License-Identifier: Apache-2.0
"""Activations between a decoder's kernels stored as float16 (FLOWNPU_GPU_HALF), which needs no extension."""

import math

import numpy as np
import pytest

from tests.decoding import float32_tolerance
from tests.npu.decoders import Session, partition, read_nodes
from tests.ops.device import testing
from tests.ops.gpu.test_session import hidden_of, logits_of

pytestmark = [pytest.mark.opencl, pytest.mark.usefixtures("pocl")]

gpu = testing.gpu


def test_logits_are_off_by_float16_s_roundings(models, monkeypatch):
    """A prompt and a token.

    A layer rounds six times what it multiplies next: both norms, the packed heads, queries, what is attended, and the
    gated; the last norm is one more. An element is off by 2^-11 at most, evenly, which is 2^-11 / sqrt(3) in the rms,
    and so is a sum of products of such; they add up in quadrature. The factor of 4: as in float32_tolerance.
    """
    monkeypatch.setenv("FLOWNPU_GPU_HALF", "1")
    session = Session(gpu.SessionDevice(), *read_nodes(models.converted("llama", kv_dtype="fp32")))
    layers, ids = session.attributes["layers"], np.random.default_rng(5).integers(3, 250, 31)
    hidden, expected = (of(models, "llama", ids) for of in (hidden_of, logits_of))
    past = session.past(40, np.float32)
    found = [session.run(hidden[begin:end], end, past)[0] for begin, end in ((0, 30), (30, 31))]
    error = np.abs(np.array(found)[:, : expected.shape[1]] - expected[29:]).max()
    assert error <= 4 * math.sqrt(6 * layers + 1) * 2.0**-11 / math.sqrt(3) * np.abs(expected[29:]).max()
    # It does round: in float32 they would be this near.
    assert error > float32_tolerance(expected[29:], layers, session.attributes["feed_forward"])


def test_what_the_variable_may_be(models, monkeypatch):
    monkeypatch.setenv("FLOWNPU_GPU_HALF", "yes")
    nodes, outputs = read_nodes(models.converted("llama", kv_dtype="fp32"))
    lowered = gpu.SessionDevice().lower(partition(nodes), outputs=outputs)
    assert "expected FLOWNPU_GPU_HALF to be 0 or 1, got 'yes'" in lowered.on_host[0][2]
