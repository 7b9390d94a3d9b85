# SPDX-License-Identifier: Apache-2.0
"""A decoder's layers on Vulkan, by lavapipe: logits, and what a token costs."""

import numpy as np
import pytest

from tests.decoding import float32_tolerance
from tests.npu.decoders import Session, read_nodes
from tests.ops.device import testing
from tests.ops.gpu.test_session import hidden_of, logits_of, run_all

pytestmark = pytest.mark.opencl


@pytest.fixture(scope="module")
def opened(models, lavapipe):
    del lavapipe
    made = {}

    def session(name):
        if name not in made:
            nodes = read_nodes(models.converted(name, kv_dtype="fp32"))
            made[name] = Session(testing.gpu.SessionDevice(half=False, vulkan=True), *nodes)
        return made[name]

    return session


@pytest.mark.parametrize(("name", "capacity"), [("trained", 330), ("llama", 0)])
def test_logits_equal_transformers(name, capacity, models, opened):
    """As on OpenCL: a prompt beyond all windows, two tokens, a second prompt and a token; shared and growing caches."""
    session = opened(name)
    sizes = session.attributes
    ids = np.random.default_rng(5).integers(3, 250, 310)
    stops = [270, 271, 272, 309, 310]
    found, _ = run_all(session, hidden_of(models, name, ids), stops, capacity)
    expected = logits_of(models, name, ids)[np.array(stops) - 1]
    tolerance = float32_tolerance(expected, sizes["layers"], sizes["feed_forward.size"])
    assert np.abs(found[:, : expected.shape[1]] - expected).max() <= tolerance


def test_tokens_allocate_nothing(models, opened):
    """The kernels and transfers of 50 tokens are OpenCL's, and memory stays what it was."""
    session = opened("trained")
    sizes = session.attributes
    hidden = hidden_of(models, "trained", np.arange(3, 63))
    _, past = run_all(session, hidden[:7], [6, 7], 64)
    before = session.device.counts()
    for end in range(8, 58):
        _, past = session.run(hidden[end - 1 : end], end, past)
    spent = {name: count - before[name] for name, count in session.device.counts().items()}
    assert spent["dispatches"] == 50 * (8 * sizes["layers"] + 2)
    assert spent["allocations"] == spent["compiled"] == spent["from_cache"] == 0
    assert spent["bytes_to_device"] == 50 * 4 * sizes["hidden"]
