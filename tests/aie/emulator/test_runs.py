# SPDX-License-Identifier: Apache-2.0
"""The emulator on small programs with kernels in Python: arrivals, counts, refusals."""

import dataclasses

import numpy as np
import pytest

from flownpu import _native
from flownpu.aie.emulator import flatten_array
from flownpu.aie.iron.compat import Buffer, Kernel, ObjectFifo, Tile, Worker, range_
from flownpu.aie.plan.data import (
    Acquire,
    Await,
    Call,
    Dimension,
    Free,
    HostBuffer,
    Release,
    SetBarrier,
    Tap,
    Transfer,
    Type,
    WriteParameter,
)
from flownpu.aie.words.writer import VERSION
from tests.aie.emulation import assert_nothing_left, call, emulate, emulator
from tests.aie.small_programs import (
    between,
    chain,
    tensor,
    with_array,
    with_body,
    with_end,
    with_fifo,
    with_step,
    with_steps,
)

SEEDS = range(20)


def numbers(count, dtype=np.int32):
    return np.arange(1, count + 1, dtype=dtype)


def scale(x, y, factor):
    y[:] = x * factor


def copy(x, y):
    y[:] = x


def first_fill(plan):
    return next(step for step in plan.sequence.steps if isinstance(step, Transfer))


def with_taps(plan, **taps):
    """The plan with other taps of these fifos' transfers, each (offset, (size, stride), ...)."""
    steps = [
        dataclasses.replace(s, tap=Tap(taps[s.fifo][0], tuple(Dimension(*d) for d in taps[s.fifo][1:])))
        if isinstance(s, Transfer) and s.fifo in taps
        else s
        for s in plan.sequence.steps
    ]
    return with_steps(plan, *steps)


def with_host(plan, **elements):
    """The plan with these host buffers, each by its name and its number of i32."""
    buffers = tuple(HostBuffer(name, Type((count,), "i32")) for name, count in elements.items())
    return dataclasses.replace(plan, sequence=dataclasses.replace(plan.sequence, buffers=buffers))


# --- What arrives -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
def test_objects_arrive_in_order_under_every_schedule(seed):
    source = numbers(4 * 64)
    found = emulate(chain(), functions={"scale": scale}, seed=seed, source=source)
    np.testing.assert_array_equal(found["target"], 3 * source)


def test_words_and_calls_are_counted():
    plan = chain()
    array = emulator(plan.array, {"scale": scale})
    call(array, plan, source=numbers(256))
    counts = array.counts()
    assert counts["calls"] == {"scale": 4}
    assert len(counts["words"]) == 6  # three fifos with two ends each
    assert set(counts["words"].values()) == {256}
    array.reset_counts()
    assert set(array.counts()["words"].values()) == {0}
    assert array.counts()["calls"] == {"scale": 0}


def test_consecutive_calls_on_one_array_equal_reference():
    """No reconfiguration between them: only run-time parameters and transfers differ."""
    plans = [chain(passes) for passes in (3, 1, 5)]
    assert plans[0].array == plans[1].array
    array = emulator(plans[0].array, {"scale": scale})
    for seed in range(5):
        for plan, passes in zip(plans, (3, 1, 5), strict=True):
            source = numbers(passes * 64) + seed
            np.testing.assert_array_equal(call(array, plan, seed=seed, source=source)["target"], 3 * source)
    assert_nothing_left(array)


def test_broadcast_waits_for_slowest_core():
    """Two cores read one stream. The second takes an object only after it has the first core's result."""
    kind, host = tensor(32), tensor(8 * 32)
    a, c = ObjectFifo(kind, name="a"), ObjectFifo(kind, name="c")
    handed = ObjectFifo(kind, name="handed", depth=1)
    add = Kernel("add", "add.cc", [kind, kind, kind])

    def first(x, y, add):
        held = x.acquire(1)
        add(held, held, y.acquire(1))
        x.release(1)
        y.release(1)

    def second(given, x, y, add):
        left, right = given.acquire(1), x.acquire(1)
        add(left, right, y.acquire(1))
        for fifo in (given, x, y):
            fifo.release(1)

    workers = [
        Worker(first, [a.cons(), handed.prod(), add], tile=Tile(0, 2)),
        Worker(second, [handed.cons(), a.cons(), c.prod(), add], tile=Tile(3, 4)),
    ]
    plan, source = between(workers, a, c, host, host), numbers(8 * 32)
    for seed in SEEDS:
        found = emulate(plan, functions={"add": lambda x, y, z: np.add(x, y, out=z)}, seed=seed, x=source)
        np.testing.assert_array_equal(found["z"], 3 * source)


def test_neighbouring_tiles_read_same_memory():
    """No DMA between vertically neighbouring tiles."""
    kind, host = tensor(32), tensor(4 * 32)
    a, b, c = (ObjectFifo(kind, name=name) for name in "abc")
    copies = Kernel("copy", "copy.cc", [kind, kind])

    def core(x, y, copies):
        copies(x.acquire(1), y.acquire(1))
        x.release(1)
        y.release(1)

    workers = [
        Worker(core, [a.cons(), b.prod(), copies], tile=Tile(0, 2)),
        Worker(core, [b.cons(), c.prod(), copies], tile=Tile(0, 3)),
    ]
    plan = between(workers, a, c, host, host)
    array = emulator(plan.array, {"copy": copy})
    np.testing.assert_array_equal(call(array, plan, x=numbers(128))["z"], numbers(128))
    assert sorted(array.counts()["words"].values()) == [128] * 4
    assert not any("fifo b" in channel for channel in array.counts()["words"])


def test_sliding_window_of_two_objects_equals_reference():
    """A sliding window: acquire two, release one; the second of a pair is the first of the next."""
    kind = tensor(16)
    a, c = ObjectFifo(kind, name="a", depth=3), ObjectFifo(kind, name="c")
    add = Kernel("add", "add.cc", [kind, kind, kind])

    def core(x, y, add):
        for _ in range_(5):
            pair = x.acquire(2)
            add(pair[0], pair[1], y.acquire(1))
            x.release(1)
            y.release(1)
        x.release(1)

    worker = Worker(core, [a.cons(), c.prod(), add], tile=Tile(0, 2))
    plan, source = between([worker], a, c, tensor(6 * 16), tensor(5 * 16)), numbers(6 * 16)
    for seed in SEEDS:
        found = emulate(plan, functions={"add": lambda x, y, z: np.add(x, y, out=z)}, seed=seed, x=source)
        np.testing.assert_array_equal(found["z"], source[:-16] + source[16:])


def test_walks_at_every_kind_of_tile_equal_numpy():
    """Shim: columns of the host's matrix; memory tile: in by rows, out transposed; compute tile: in order."""
    plan = chain(1, 8 * 12)
    plan = with_end(plan, "b", "produce", walk=(Dimension(12, 1), Dimension(8, 12)))
    plan = with_host(with_taps(plan, a=(4, (8, 20), (12, 1))), source=8 * 20, target=8 * 12)
    source = numbers(8 * 20).reshape(8, 20)
    found = emulate(plan, functions={"scale": scale}, source=source)
    np.testing.assert_array_equal(found["target"].reshape(12, 8), 3 * source[:, 4:16].T)
    received = with_end(plan, "b", "consume", walk=(Dimension(12, 1), Dimension(8, 12)))  # and back again
    found = emulate(received, functions={"scale": scale}, source=source)
    np.testing.assert_array_equal(found["target"].reshape(8, 12), 3 * source[:, 4:16])


def test_loops_over_parameters_and_indices_run_expected_times():
    kind, words = tensor(16), tensor(16)
    a, c = ObjectFifo(kind, name="a"), ObjectFifo(kind, name="c")
    counter = Buffer(words, name="counter", initial_value=np.zeros(16, np.int32))
    note = Kernel("note", "note.cc", [kind, kind, words, np.int32])

    def core(x, y, counter, note):
        source, target = x.acquire(1), y.acquire(1)
        for i in range_(2, 11, 3):
            for j in range_(i):
                counter[1] = counter[1] + (i * 10 - j) // 4 % 7 + (j - i * 10) // 4 % 7
        note(source, target, counter, counter[1])
        x.release(1)
        y.release(1)

    def noted(x, y, counter, value):
        assert value == counter[1]
        y[:] = x + value

    worker = Worker(core, [a.cons(), c.prod(), counter, note], tile=Tile(0, 2))
    found = emulate(between([worker], a, c, kind, kind), functions={"note": noted}, x=numbers(16))
    # The remainder has the sign of the left operand, as MLIR's arith.remsi has it.
    left = np.array([number // 4 for i in range(2, 11, 3) for j in range(i) for number in (i * 10 - j, j - i * 10)])
    expected = np.fmod(left, 7).sum()
    np.testing.assert_array_equal(found["z"], numbers(16) + expected)


# --- What goes wrong --------------------------------------------------------------------------------------------------


def fails(plan, message, *, functions=None):
    functions = {"scale": scale} if functions is None else functions
    with pytest.raises(RuntimeError, match=message):
        emulate(plan, functions=functions, checked=False, source=numbers(plan.sequence.buffers[0].type.elements))


def test_transfer_beyond_host_buffer_fails():
    tap = dataclasses.replace(first_fill(chain()).tap, offset=1)
    fails(
        with_step(chain(), Transfer, tap=tap),
        "transfer a_task0 reaches byte 1028 of host buffer source, which has 1024",
    )


def test_descriptor_beyond_object_fails():
    plan = with_end(chain(), "b", "produce", walk=(Dimension(32, 3), Dimension(2, 1)))
    fails(plan, r"a descriptor of object 0 of a at \(0, 1\) reaches byte 380, it has 256")


def test_kernel_write_behind_argument_fails():
    def writes_behind(x, y, factor):
        scale(x, y, factor)
        np.lib.stride_tricks.as_strided(y, (65,), (4,))[64] = 1

    fails(chain(), r"scale on core \(0, 2\) wrote behind object 0 of c at \(0, 2\)", functions={"scale": writes_behind})


def test_unwritten_and_released_objects_read_as_minus_one():
    """So do reads after a release: an object that is not filled again holds -1 (NaN in floating point)."""
    seen = []

    def looks(x, y, factor):
        seen.append((y.copy(), x))
        scale(x, y, factor)

    plan = chain(6)
    array = emulator(plan.array, {"scale": looks})
    call(array, plan, source=numbers(6 * 64))
    for before, released in seen:
        np.testing.assert_array_equal(before, -1)
        np.testing.assert_array_equal(released, -1)


def test_acquire_of_fewer_objects_than_held_changes_nothing():
    """The acquire takes nothing, and nothing is released."""

    def fewer(body):
        acquire = next(s for s in body if isinstance(s, Acquire) and s.port == "consume")
        again = dataclasses.replace(acquire, name="again", count=1)
        twice = next(s for s in body if isinstance(s, Release) and s.port == "consume")
        body = [dataclasses.replace(s, count=2) if s is acquire or s is twice else s for s in body]
        return [*body[:-2], again, *body[-2:]]

    plan = with_body(chain(3), fewer)
    plan = with_host(with_taps(plan, a=(0, (6 * 64, 1))), source=6 * 64, target=3 * 64)
    for seed in SEEDS:
        found = emulate(plan, functions={"scale": scale}, source=numbers(6 * 64), checked=False, seed=seed)
        np.testing.assert_array_equal(found["target"].reshape(3, 64), 3 * numbers(6 * 64).reshape(3, 2, 64)[:, 0])


def test_unwritten_run_time_parameter_fails():
    steps = [step for step in chain().sequence.steps if not isinstance(step, WriteParameter)]
    fails(with_steps(chain(), *steps), "word 0 of parameters is loaded before it was written")


def test_early_free_fails():
    steps = [Free(s.transfer) if isinstance(s, Await) else s for s in chain().sequence.steps]
    fails(
        with_steps(chain(), *steps), "frees a descriptor that input channel 0 of shim tile .0, 0. .fifo c. still uses"
    )


def test_await_without_token_fails():
    steps = [dataclasses.replace(s, token=False) if isinstance(s, Transfer) else s for s in chain().sequence.steps]
    fails(with_steps(chain(), *steps), "awaits a transfer that reports no end")


def test_sequence_that_ends_before_its_transfers_fails():
    steps = [s for s in chain().sequence.steps if not isinstance(s, (Await, Free, SetBarrier))]
    fails(with_steps(chain(), *steps), "has ended, and transfer c_task1 is still under way on")


def test_lock_overflow_fails():
    fails(with_end(chain(), "a", "consume", depth=64), r"free objects of a at \(0, 1\).*64")


def test_missing_kernel_is_refused():
    with pytest.raises(RuntimeError, match="there is no kernel scale for xdna2"):
        emulator(chain().array)


def test_kernel_with_other_parameters_is_refused():
    plan = chain()
    kernel = dataclasses.replace(plan.array.kernels[0], entry="zero_f32")
    plan = with_body(
        plan, lambda body: [dataclasses.replace(s, kernel="zero_f32") if isinstance(s, Call) else s for s in body]
    )
    with pytest.raises(RuntimeError, match="kernel zero_f32 has other parameters"):
        emulator(with_array(plan, kernels=(kernel,)).array)


def test_exception_of_python_kernel_is_raised():
    with pytest.raises(ZeroDivisionError):
        emulate(chain(), functions={"scale": lambda *_: 1 // 0}, source=numbers(256))


def test_trapped_access_names_core_and_kernel():
    """The host's model of the vector unit refuses the access: 24 numbers do not fill whole vectors."""
    plan = chain(4, 24)
    kinds = (Type((24,), "f32"), Type((), "i32"))
    plan = with_array(plan, kernels=(dataclasses.replace(plan.array.kernels[0], entry="zero_f32", arguments=kinds),))
    for name in "abc":
        plan = with_fifo(plan, name, type=kinds[0])
    plan = with_body(
        plan, lambda body: [Call("zero_f32", (s.arguments[1], 24)) if isinstance(s, Call) else s for s in body]
    )
    fails(
        plan,
        r"core \(0, 2\), zero_f32: store of 64 bytes at byte 64 of argument 0 .float32., which has 96",
        functions={},
    )


def test_wrong_host_buffer_and_call_after_failure_are_refused():
    plan = chain()
    array = emulator(plan.array, {"scale": scale})
    with pytest.raises(RuntimeError, match="expected host buffer source of 1024 bytes, got 1020"):
        array.run(plan.sequence, [numbers(255), numbers(256)])
    with pytest.raises(RuntimeError, match="has 2 host buffers, got 1"):
        array.run(plan.sequence, [numbers(256)])
    with pytest.raises(ValueError, match="expected contiguous host buffers"):
        array.run(plan.sequence, [numbers(512)[::2], numbers(256)])
    call(array, plan, source=numbers(256))  # the refused calls began nothing, so the emulator can go on
    with pytest.raises(RuntimeError, match="still under way"):
        call(array, with_steps(plan, *plan.sequence.steps[3:4]), source=numbers(256))
    with pytest.raises(RuntimeError, match="a call before this one failed"):
        call(array, plan, source=numbers(256))


# --- The flat form ----------------------------------------------------------------------------------------------------


def test_flat_form_is_equal_after_file(tmp_path):
    flat = flatten_array(chain().array)
    flat.words.tofile(tmp_path / "array")
    np.testing.assert_array_equal(_native.read_words(str(tmp_path / "array")), flat.words)
    with pytest.raises(RuntimeError, match="nothing cannot be read"):
        _native.read_words(str(tmp_path / "nothing"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda words: words[:-1], "ends in the middle"),
        (lambda words: words[:3], "ends in the middle"),
        (lambda words: np.array([1, *words[1:]]), "these are no words that FlowNPU wrote"),
        (
            lambda words: np.array([words[0], 99, *words[2:]]),
            f"the program: expected version {VERSION}, got version 99",
        ),
        (lambda words: np.array([*words[:2], 2, *words[3:]]), "expected an array"),
    ],
)
def test_words_that_are_no_program_are_refused(change, message):
    words = flatten_array(chain().array).words
    with pytest.raises(RuntimeError, match=message):
        _native.Emulator(change(words), "", {"scale": scale})


def test_sequence_of_another_array_is_refused():
    plan, other = chain(), chain(4, 32)
    words = flatten_array(other.array).flatten(other.sequence)
    array = _native.Emulator(flatten_array(plan.array).words, "", {"scale": scale})
    with pytest.raises(RuntimeError, match="sequence sequence is for another array"):
        array.run(words, [], 0, True, "")


def test_unknown_name_of_last_core_is_refused():
    plan = chain()
    array = _native.Emulator(flatten_array(plan.array).words, "", {"scale": scale})
    with pytest.raises(RuntimeError, match=r"expected the name of a core or a channel, got core \(0, 3\)"):
        array.run(
            flatten_array(plan.array).flatten(plan.sequence),
            [np.zeros(256, np.int32).view(np.uint8)] * 2,
            2,
            True,
            "core (0, 3)",
        )
