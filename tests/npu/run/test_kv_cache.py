# SPDX-License-Identifier: Apache-2.0
"""KV caches on the array, the tensors that represent them, and every operation of callers on a past."""

import ml_dtypes
import numpy as np
import pytest

from flownpu.ops.definitions.flow_qkv_attention import reference
from tests.npu.decoders import npu
from tests.ops.device import _argument

LAYERS, G, D, CONTEXT = 2, 2, 32, 48
BFLOAT16 = ml_dtypes.bfloat16
TYPES = (BFLOAT16, np.float16, np.float32)


def arguments(tensors):
    return [_argument(tensor) for tensor in tensors]


class Host:
    """A session's caches; its runs write random keys and values where an array would write its own."""

    def __init__(self, rng, *windows):
        self.rng = rng
        self.windows = windows or (0,) * LAYERS
        self.caches = npu.KvCaches(npu.open_emulated_runtime("npu2"), list(self.windows), G, D, CONTEXT)

    def tensors(self, capacity, dtype=BFLOAT16):
        return [np.zeros((1, G, capacity, D), dtype) for _ in range(2 * LAYERS)]

    def view(self, cache):
        """The array's content of a cache: [layer, position, G, 2, d]."""
        buffer = cache.buffer()
        buffer.to_host(0, buffer.bytes().size)
        return np.asarray(buffer.bytes().view(BFLOAT16)).reshape(LAYERS, CONTEXT, G, 2, D)

    def run(self, pasts, presents, past, tokens, *, fails=False):
        """A run of `tokens` from `past` on. Returns all keys and values of its positions."""
        cache = self.caches.begin(arguments(pasts), arguments(presents), past)
        lines = self.view(cache)
        lines[:, past : past + tokens] = self.rng.normal(size=(LAYERS, tokens, G, 2, D)).astype(BFLOAT16)
        buffer = cache.buffer()
        buffer.to_device(0, buffer.bytes().size)
        if not fails:
            self.caches.finish(cache, arguments(presents), past + tokens)
        found = lines[:, : past + tokens].copy()
        buffer.bytes()[:] = 0xFF  # the host does not have the array's writes
        return found

    def restored(self, tensors):
        for tensor in tensors:
            assert self.caches.restore(_argument(tensor))
        return tensors


@pytest.fixture
def host(rng):
    return Host(rng)


def lines_of(tensors, count):
    """Keys and values of tensors [1, G, P, d], in the array's order: [layer, position, G, 2, d]."""
    stacked = np.stack([tensor[0, :, :count] for tensor in tensors]).reshape(LAYERS, 2, G, count, D)
    return stacked.transpose(0, 3, 2, 1, 4)


def assert_same(found, expected):
    assert np.asarray(found).astype(BFLOAT16).tobytes() == expected.tobytes()


@pytest.mark.parametrize("share", [True, False])
def test_conversation_goes_on_in_place(host, share):
    past = host.tensors(CONTEXT if share else 0)
    expected = np.zeros((LAYERS, 0, G, 2, D), BFLOAT16)
    for tokens in (7, 1, 1, 4):
        position = expected.shape[1]
        present = past if share else host.tensors(position + tokens)
        found = host.run(past, present, position, tokens)
        assert_same(found[:, :position], expected)
        expected, past = found, present
    assert host.caches.count() == 1
    assert_same(lines_of(host.restored(past), 13), expected)


@pytest.mark.parametrize("dtype", TYPES, ids=lambda dtype: np.dtype(dtype).name)
def test_foreign_past_is_copied(host, rng, dtype):
    past = host.tensors(CONTEXT, dtype)
    for tensor in past:
        tensor[:, :, :9] = rng.normal(size=(1, G, 9, D))
    expected = lines_of(past, 9).astype(np.float32).astype(BFLOAT16)
    found = host.run(past, past, 9, 2)
    assert_same(found[:, :9], expected)
    # And given back: float32 has every number of bf16, float16 all but the smallest.
    restored = lines_of(host.restored(past), 11)
    np.testing.assert_allclose(restored.astype(float), found.astype(float), rtol=0, atol=2.0**-25)
    assert not host.caches.restore(_argument(past[0])), "it stands for nothing any more"


def test_longer_past_than_context_is_accepted(host):
    past = host.tensors(CONTEXT + 100)
    expected = host.run(past, past, 0, CONTEXT)
    restored = host.restored(past)
    assert_same(lines_of(restored, CONTEXT), expected)
    assert not any(tensor[:, :, CONTEXT:].any() for tensor in restored)


@pytest.mark.parametrize("share", [True, False])
def test_rewound_cache_gives_same_output(host, share):
    past = host.tensors(CONTEXT if share else 12)
    first = host.run(past, past, 0, 12)
    shorter = past if share else [tensor[:, :, :5].copy() for tensor in past]  # as GenAI rewinds
    present = past if share else host.tensors(8)
    second = host.run(shorter, present, 5, 3)
    assert_same(second[:, :5], first[:, :5])
    assert host.caches.count() == 1
    third = host.run(present, present, 8, 1)
    assert_same(third[:, :8], second)


def test_branches_keep_own_caches(host):
    """A kept past is continued twice, and each of the two branches again."""
    trunk = host.tensors(10)
    base = host.run(trunk, trunk, 0, 10)
    kept = [tensor.copy() for tensor in trunk]
    one, two = host.tensors(12), host.tensors(13)
    first = host.run(trunk, one, 10, 2)
    second = host.run(kept, two, 10, 3)
    assert host.caches.count() == 2
    assert_same(first[:, :10], base)
    assert_same(second[:, :10], base)
    assert_same(host.run(one, one, 12, 1)[:, :12], first)
    assert_same(host.run(two, two, 13, 1)[:, :13], second)
    assert host.caches.count() == 2


def test_branch_before_end_uses_second_cache(host):
    trunk = host.tensors(10)
    base = host.run(trunk, trunk, 0, 10)
    one = host.tensors(12)
    host.run(trunk, one, 10, 2)
    assert_same(host.run(trunk, host.tensors(7), 6, 1)[:, :6], base[:, :6])
    assert host.caches.count() == 2


def test_overwritten_past_is_refused(host):
    trunk, one = host.tensors(10), host.tensors(12)
    base = host.run(trunk, trunk, 0, 10)
    host.run(trunk, one, 10, 2)
    host.run([tensor[:, :, :4].copy() for tensor in one], host.tensors(6), 4, 2)
    with pytest.raises(RuntimeError, match="the past of 10 tokens was overwritten from token 4 on by a run that went"):
        host.run(trunk, host.tensors(11), 10, 1)
    with pytest.raises(RuntimeError, match="the past of 12 tokens was overwritten from token 4 on"):
        host.caches.restore(_argument(one[0]))
    assert_same(host.run(trunk, host.tensors(5), 4, 1)[:, :4], base[:, :4])  # what is left of it


def test_failed_run_leaves_earlier_positions(host):
    past = host.tensors(CONTEXT)
    expected = host.run(past, past, 0, 9)
    host.run(past, past, 6, 4, fails=True)
    restored = host.restored([tensor.copy() for tensor in past])
    assert_same(lines_of(restored, 6), expected[:, :6])
    assert_same(host.run(past, past, 6, 1)[:, :6], expected[:, :6])


def test_new_conversation_takes_cache_of_its_tensors(host):
    past = host.tensors(CONTEXT)
    for _ in range(10):
        host.run(past, past, 0, 5)
        host.run(past, past, 5, 1)
    assert host.caches.count() == 1
    present = host.tensors(5)  # also where the present takes the memory of an older one
    host.run(past, present, 6, 1)
    host.run(host.tensors(0), present, 0, 3)
    assert host.caches.count() == 1


def test_copied_old_present_leaves_cache_of_live_conversation(host):
    past = host.tensors(CONTEXT)
    host.run(past, past, 0, 5)
    old = [tensor.copy() for tensor in past]
    expected = host.run(past, past, 5, 1)
    host.run(old, old, 0, 4)
    assert host.caches.count() == 2
    assert_same(host.run(past, past, 6, 1)[:, :6], expected)


def test_least_recently_used_cache_is_given_up(host):
    most = npu.KvCaches.most
    conversations = [host.tensors(CONTEXT) for _ in range(most + 1)]
    expected = [host.run(past, past, 0, 3) for past in conversations[:most]]
    host.run(conversations[0], conversations[0], 3, 1)  # so the second is the least recently used
    host.run(conversations[most], conversations[most], 0, 2)
    assert host.caches.count() == most
    with pytest.raises(RuntimeError, match=f"gone: a session keeps those of the {most} conversations"):
        host.run(conversations[1], conversations[1], 3, 1)
    assert not host.caches.restore(_argument(conversations[1][0]))
    assert_same(host.run(conversations[2], conversations[2], 3, 1)[:, :3], expected[2])


def test_past_of_other_session_is_refused(host, rng):
    past = host.tensors(CONTEXT)
    Host(rng).run(past, past, 0, 3)
    with pytest.raises(RuntimeError, match="stands for a KV cache that is gone"):
        host.run(past, past, 3, 1)


def test_tokens_not_run_are_taken_from_tensor(host, rng):
    """Some callers append the next turn without having run the last sampled token."""
    past = host.tensors(CONTEXT)
    expected = host.run(past, past, 0, 5)
    for tensor in past:
        tensor[:, :, 5:7] = rng.normal(size=(1, G, 2, D))
    given = lines_of(past, 7)[:, 5:]
    found = host.run(past, past, 7, 1)
    assert_same(found[:, :5], expected)
    assert_same(found[:, 5:7], given)


@pytest.mark.parametrize("mix", ["another run's", "in another's place", "none"])
def test_pasts_of_several_runs_are_refused(host, mix):
    past, other = host.tensors(CONTEXT), host.tensors(CONTEXT)
    host.run(past, past, 0, 4)
    host.run(other, other, 0, 4)
    if mix == "in another's place":
        past[2], past[3] = past[3], past[2]
    else:
        past[3] = other[3] if mix == "another run's" else host.tensors(CONTEXT)[3]
    part = "key of layer 1" if mix == "in another's place" else "value of layer 1"
    with pytest.raises(RuntimeError, match=f"expected past keys and values that one run made.* the past {part}"):
        host.run(past, past, 4, 1)


def test_past_too_short_is_refused(host):
    short = host.tensors(3)
    with pytest.raises(RuntimeError, match="expected a past of at least 4 positions in layer 0, got 3"):
        host.run(short, host.tensors(5), 4, 1)
    assert host.caches.count() == 0


def test_unrelated_tensors_are_left_alone(host):
    for tensor in (np.arange(64, dtype=np.int64), np.zeros((1, 2, 0, 32), np.float32), np.ones((4, 4), np.float32)):
        before = tensor.copy()
        assert not host.caches.restore(_argument(tensor))
        np.testing.assert_array_equal(tensor, before)


# --- Window-sized caches ----------------------------------------------------------------------------------------------

WINDOW, CAPACITY = 6, 10


def window_sized(keys, total):
    """The keys of [total, G, d] that the operator's definition keeps in a cache of CAPACITY and a window of WINDOW."""
    past = np.zeros((1, G, CAPACITY, D), np.float32)
    none = np.zeros((1, total, G * D))
    rows = keys.reshape(1, total, G * D).astype(float)
    _, present, _ = reference(
        none, rows, none, past_key=past, past_value=past, seqlens_k=np.array([total - 1]),
        total_sequence_length=np.array([total]), num_heads=G, kv_num_heads=G, head_size=D,
        local_window_size=WINDOW, sliding_window_cache=1,
    )  # fmt: skip
    return present


@pytest.mark.parametrize("total", [3, CAPACITY, CAPACITY + 1, 17, 40])
def test_window_sized_tensors_equal_whole_cache(rng, total):
    """The second layer's tensors hold what GroupQueryAttention's compaction leaves; a later run takes it over."""
    host = Host(rng, 0, WINDOW)
    past = host.tensors(CONTEXT)[:2] + host.tensors(CAPACITY)[2:]
    expected = host.run(past, past, 0, total)
    restored = host.restored(past)
    for place, tensor in enumerate(restored[2:]):
        rows = expected[1, :, :, place]
        compacted = window_sized(rows, total)
        held = np.abs(compacted).sum((0, 1, 3)) > 0
        np.testing.assert_array_equal(tensor.astype(np.float32)[:, :, held], compacted[:, :, held])

    found = host.run(restored, restored, total, 1)
    assert host.caches.count() == 2
    assert_same(found[0, :total], expected[0])
    seen = slice(max(0, total - WINDOW + 1), total)  # the earlier positions in the new token's window
    assert_same(found[1, seen], expected[1, seen])
