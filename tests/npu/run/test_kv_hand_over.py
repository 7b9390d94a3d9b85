# SPDX-License-Identifier: Apache-2.0
"""Conversations that two devices, or a device and the host, compute by turns: each finds what the other wrote."""

import numpy as np
import pytest

from tests.npu.decoders import npu
from tests.npu.run.test_kv_cache import BFLOAT16, CONTEXT, LAYERS, D, G, Host, arguments, assert_same, lines_of

SWITCHES = 1000
WINDOW = 8


class Places(Host):
    """Two devices that share a session's caches, and the host, which computes in the tensors."""

    def __init__(self, rng, *windows):
        super().__init__(rng, *windows)
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


@pytest.mark.parametrize("seed", range(4))
def test_windows_rows_alone_move_between_devices(rng, seed):
    """Random runs, rewinds, failures and copies on two devices: what a window shows is there, and of what it does not
    show nothing was copied: there are zeros, as in new memory, or what the device computed itself.
    """
    random = np.random.default_rng(seed)
    places = Places(rng, 0, WINDOW)
    conversations = [(places.tensors(CONTEXT), np.zeros((LAYERS, 0, G, 2, D), BFLOAT16))]
    left = 0
    for _ in range(300):
        number = random.integers(len(conversations))
        tensors, expected = conversations[number]
        if random.random() < 0.05 and len(conversations) < 3:
            tensors = [tensor.copy() for tensor in tensors]
            number = len(conversations)
            conversations.append((tensors, expected))
        past = expected.shape[1] if expected.shape[1] < CONTEXT - 13 else 3
        if past > 0 and random.random() < 0.2:
            past = int(random.integers(1, past + 1))
        fails = random.random() < 0.1
        try:
            before, after = places.run_on(
                ("first", "second")[random.integers(2)], tensors, past, int(random.integers(1, 13)), fails=fails
            )
        except RuntimeError as error:
            if "overwritten" not in str(error) and "is gone" not in str(error):
                raise
            conversations[number] = (places.tensors(CONTEXT), expected[:, :0])
            continue
        seen = max(past + 1 - WINDOW, 0)
        assert_same(before[:1], expected[:1, :past])
        assert_same(before[1:, seen:], expected[1:, seen:past])
        left += int((before[1, :seen] != expected[1, :seen]).any(axis=(1, 2, 3)).sum())
        made = expected[:, :past] if fails else np.concatenate([expected[:, :past], after], axis=1)
        conversations[number] = (tensors, made)
    assert left > 100, "rows that no window shows were copied"


def test_rewind_before_window_finds_rows_that_were_left(rng):
    places = Places(rng, 0, WINDOW)
    tensors = places.tensors(CONTEXT)
    _, prompt = places.run_on("first", tensors, 0, 30)
    before, _ = places.run_on("second", tensors, 30, 1)
    assert not np.asarray(before[1, : 31 - WINDOW]).any()
    assert_same(before[1:, 31 - WINDOW :], prompt[1:, 31 - WINDOW :])
    before, _ = places.run_on("second", tensors, 12, 1)
    assert_same(before[:, 13 - WINDOW :], prompt[:, 13 - WINDOW : 12])


@pytest.mark.parametrize("part", [0, 1, 2 * LAYERS - 1])
def test_cancelled_hand_over_to_host_is_repeated(places, part):
    """The tensors of a run that ended in the middle of the copying stand for the cache as before."""
    tensors = places.tensors(CONTEXT)
    _, prompt = places.run_on("first", tensors, 0, 9)
    kept = tensors[part]
    tensors[part] = kept[:, :, :5].copy()  # has no room for 9 positions, which is noticed when its turn comes
    with pytest.raises(RuntimeError, match="expected a past of at least 9 positions"):
        places.run_on("host", tensors, 9, 1)
    tensors[part] = kept
    before, after = places.run_on("host", tensors, 9, 1)
    assert_same(before, prompt)
    before, _ = places.run_on("first", tensors, 10, 1)
    assert_same(before, np.concatenate([prompt, after], axis=1))


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
