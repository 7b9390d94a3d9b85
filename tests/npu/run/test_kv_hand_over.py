# SPDX-License-Identifier: Apache-2.0
"""Conversations that two devices, or a device and the host, compute by turns: each finds what the other wrote."""

import numpy as np
import pytest

from tests.npu.decoders import npu
from tests.npu.run.test_kv_cache import BFLOAT16, CONTEXT, LAYERS, D, G, Host, arguments, assert_same, lines_of

SWITCHES = 1000


class Places(Host):
    """Two devices that share a session's caches, and the host, which computes in the tensors."""

    def __init__(self, rng):
        super().__init__(rng)
        first, self.runtime = self.caches, npu.open_emulated_runtime("npu2")
        second = npu.KvCaches(self.runtime, list(self.windows), G, D, CONTEXT)
        second.share(first)
        self.devices = {"first": first, "second": second}

    def run_on(self, place, tensors, past, tokens, *, fails=False):
        """A run in place. Returns the keys and values of the positions before it, and those that it writes."""
        if place != "host":
            self.caches = self.devices[place]
            found = self.run(tensors, tensors, past, tokens, fails=fails)
            return found[:, :past], found[:, past:]
        cache = self.caches.lend(arguments(tensors), past)
        before = lines_of(tensors, past)
        for tensor in tensors:
            tensor[:, :, past : past + tokens] = self.rng.normal(size=(1, G, tokens, D))
        after = lines_of(tensors, past + tokens)[:, past:].copy()
        if not fails:
            self.caches.take_back(cache, arguments(tensors), past, past + tokens)
        return before, after


@pytest.fixture
def places(rng):
    return Places(rng)


def test_switches_keep_one_cache(places):
    tensors, expected = places.tensors(CONTEXT), np.zeros((LAYERS, 0, G, 2, D), BFLOAT16)
    for switch in range(SWITCHES):
        past = expected.shape[1] if expected.shape[1] < CONTEXT - 2 else 5  # a rewind
        before, after = places.run_on(("first", "host", "second")[switch % 3], tensors, past, 1 + switch % 2)
        assert_same(before, expected[:, :past])
        expected = np.concatenate([expected[:, :past], after], axis=1)
    assert places.caches.count() == 1


@pytest.mark.parametrize("seed", range(4))
def test_random_runs_find_what_earlier_ones_wrote(places, seed):
    """Places, rewinds, failed runs and copies in any order. A copy whose tokens were overwritten by a run of another
    may be refused; then the caller begins anew.
    """
    random = np.random.default_rng(seed)
    conversations = []
    refused = 0
    for _ in range(300):
        if len(conversations) < 2:
            conversations.append((places.tensors(CONTEXT), np.zeros((LAYERS, 0, G, 2, D), BFLOAT16)))
        number = random.integers(len(conversations))
        tensors, expected = conversations[number]
        if random.random() < 0.1 and len(conversations) < 4:
            tensors = [tensor.copy() for tensor in tensors]
            number = len(conversations)
            conversations.append((tensors, expected))
        past = random.integers(1, expected.shape[1] + 1) if expected.shape[1] and random.random() < 0.2 else (
            expected.shape[1] if expected.shape[1] < CONTEXT - 4 else 3
        )  # fmt: skip
        fails = random.random() < 0.1
        place = ("first", "second", "host")[random.integers(3)]
        try:
            before, after = places.run_on(place, tensors, int(past), int(random.integers(1, 4)), fails=fails)
        except RuntimeError as error:
            if "overwritten" not in str(error) and "is gone" not in str(error):
                raise
            refused += 1
            del conversations[number]
            continue
        assert_same(before, expected[:, :past])
        conversations[number] = (tensors, expected[:, :past] if fails else np.concatenate([before, after], axis=1))
    assert refused < 30
    assert places.caches.count() <= npu.KvCaches.most


def test_copies_of_host_tensors_go_on_anywhere(places):
    """After a run of the host its tensors hold everything, so that a copy of them is no worse than they are."""
    tensors = places.tensors(CONTEXT)
    _, prompt = places.run_on("first", tensors, 0, 6)
    _, token = places.run_on("host", tensors, 6, 1)
    kept = [tensor.copy() for tensor in tensors]
    places.run_on("first", tensors, 7, 2)
    for place in ("host", "second", "first"):
        copy = [tensor.copy() for tensor in kept]
        before, _ = places.run_on(place, copy, 7, 1)
        assert_same(before, np.concatenate([prompt, token], axis=1))
