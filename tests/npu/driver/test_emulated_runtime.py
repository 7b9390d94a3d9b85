# SPDX-License-Identifier: Apache-2.0
"""The runtime over the emulator: the emulator's results, and the same rules as for a real NPU."""

import contextlib
import dataclasses
import gc

import numpy as np
import pytest

from flownpu.aie.designs.vector_operators import RMSNorm
from flownpu.aie.plan.data import Await, Free, Transfer
from tests.aie.designs.cases import rms_norm_case
from tests.aie.emulation import call, emulator, plan_of
from tests.aie.small_programs import chain
from tests.npu.arrays import Bench, npu, read, whole

ROWS, N = 4, 64
BYTES = 2 * ROWS * N  # of x and y
WORD = 8  # bytes


@contextlib.contextmanager
def device_error(failure, message):
    with pytest.raises(npu.DeviceError, match=message) as caught:
        yield caught
    assert caught.value.failure == failure


@pytest.fixture
def case(rng):
    return rms_norm_case(RMSNorm("npu2", N), ROWS, rng)


@pytest.fixture
def bench(case, tmp_path):
    return Bench(case.plan, tmp_path)


def without(plan, fifo):
    """The plan with nothing sent on this fifo."""
    gone = {step.name for step in plan.sequence.steps if isinstance(step, Transfer) and step.fifo == fifo}
    steps = tuple(
        step
        for step in plan.sequence.steps
        if not (isinstance(step, Transfer) and step.fifo == fifo)
        and not (isinstance(step, Await | Free) and step.transfer in gone)
    )
    assert gone
    return dataclasses.replace(plan, sequence=dataclasses.replace(plan.sequence, steps=steps))


# --- Results ----------------------------------------------------------------------------------------------------------


def test_later_call_of_dispatch_sees_earlier_results(bench, case):
    """A norm of a norm; their rows are parts of one buffer."""
    x, once, twice = 3 * BYTES + 64, 4, BYTES + 64
    state = bench.buffer(np.concatenate([np.zeros(x, np.uint8), case.inputs["x"].reshape(-1).view(np.uint8)]))
    weight = bench.buffer(case.inputs["weight"])
    assert [record.name for record in case.plan.sequence.buffers] == ["x", "weight", "y"]
    steps = [
        (bench.sequence(case.plan), [(state, source, BYTES), (weight, 0, 2 * N), (state, target, BYTES)])
        for source, target in [(x, once), (once, twice)]
    ]
    bench.run(*steps)
    state.to_host(twice, BYTES)
    array = emulator(case.plan.array)
    first = call(array, case.plan, **case.inputs)["y"]
    second = call(array, case.plan, x=first, weight=case.inputs["weight"])["y"]
    content = state.bytes()
    assert content[twice : twice + BYTES].tobytes() == second.tobytes()
    assert not content[:twice].any()  # only that was moved
    assert not content[twice + BYTES : x].any()


def test_changed_words_are_read_again(bench, case):
    """The same norm with another epsilon."""
    other = plan_of(RMSNorm("npu2", N).program(ROWS, 0.5))
    words, others = (bench.flat.flatten(plan.sequence) for plan in (case.plan, other))
    differing = np.flatnonzero(words != others)
    assert 0 < len(differing) < len(words)
    array = emulator(case.plan.array)
    expected = [call(array, plan, **case.inputs)["y"].tobytes() for plan in (case.plan, other)]
    assert expected[0] != expected[1]

    buffers = bench.buffers(case.plan, **case.inputs)
    sequence = bench.sequence(case.plan)
    sent = 0
    for number, (now, changed) in enumerate([(words, len(words)), (others, len(differing)), (others, 0), (words, 2)]):
        if number:
            for word in differing:
                sequence.write(int(word), int(now[word]))
        bench.run((sequence, whole(*buffers.values())))
        buffers["y"].to_host(0, BYTES)
        assert read(buffers["y"], case.plan, "y").tobytes() == expected[1 if now is others else 0]
        sent += (changed if number < 3 else len(differing)) * WORD
        assert bench.runtime.counts()["word_bytes"] == sent
    with pytest.raises(RuntimeError, match=f"sequence .* has {len(words)} words, got word {len(words)}"):
        sequence.write(len(words), 0)


# --- Buffers ----------------------------------------------------------------------------------------------------------


def test_input_not_moved_to_array_is_absent(bench, case):
    buffers = bench.buffers(case.plan, **case.inputs)
    buffers["x"] = bench.runtime.allocate(BYTES)
    buffers["x"].bytes()[:] = case.inputs["x"].reshape(-1).view(np.uint8)  # and no to_device
    bench.run((bench.sequence(case.plan), whole(*buffers.values())))
    buffers["y"].to_host(0, BYTES)
    assert not read(buffers["y"], case.plan, "y").astype(float).any()  # the norm of zeros


def test_output_not_moved_to_host_is_absent(bench, case):
    buffers = bench.buffers(case.plan, **case.inputs)
    before = read(buffers["y"], case.plan, "y").tobytes()
    bench.run((bench.sequence(case.plan), whole(*buffers.values())))
    assert read(buffers["y"], case.plan, "y").tobytes() == before
    half = BYTES // 2
    buffers["y"].to_host(half, half)
    after, expected = read(buffers["y"], case.plan, "y").tobytes(), case.check().tobytes()
    assert (after[:half], after[half:]) == (before[:half], expected[half:])


def test_buffers_begin_on_pages_and_hold_zeros(bench):
    for size in (1, 4096, 5000):
        buffer = bench.runtime.allocate(size)
        content = buffer.bytes()
        assert content.ctypes.data % 4096 == 0
        assert content.size == size
        assert not content.any()
        content[:] = 7
        buffer.to_host(0, size)  # the array's are zeros as well
        assert not content.any()


def test_moves_outside_of_buffer_are_refused(bench):
    buffer = bench.runtime.allocate(100)
    for move in (buffer.to_device, buffer.to_host):
        move(100, 0)
        for offset, size in [(0, 101), (100, 1), (101, 0), (2**64 - 1, 2)]:
            with pytest.raises(RuntimeError, match="expected to move bytes of a buffer of 100, got"):
                move(offset, size)
    assert bench.runtime.counts()["bytes_to_device"] == 0


@pytest.mark.parametrize("size", [2**46, 2**63 + 1])
def test_buffer_beyond_memory_is_refused(bench, size):
    before = bench.runtime.counts()["buffer_bytes"]
    with device_error("memory", f"expected a buffer of {size} bytes, there is no memory for it; use a shorter"):
        bench.runtime.allocate(size)
    assert bench.runtime.counts()["buffer_bytes"] == before


def test_buffers_and_arrays_work_after_their_runtime(bench, case):
    buffers = bench.buffers(case.plan, **case.inputs)
    sequence = bench.sequence(case.plan)
    del bench.runtime
    gc.collect()
    buffers["x"].to_host(0, BYTES)
    assert read(buffers["x"], case.plan, "x").tobytes() == case.inputs["x"].tobytes()
    sequence.write(0, 0)


# --- What goes wrong --------------------------------------------------------------------------------------------------


def test_deadlock_ends_array(bench, case):
    buffers = bench.buffers(case.plan, **case.inputs)
    arguments = whole(*buffers.values())
    good, bad = bench.sequence(case.plan), bench.sequence(without(case.plan, "weight"))
    bench.run((good, arguments))
    with device_error("command", r"(?s)call 1: the array ended with an error: \[emulator\] deadlock: .*weight.*again$"):
        bench.run((good, arguments), (bad, arguments), (good, arguments))
    assert bench.runtime.counts()["calls"] == 3  # the third was not run
    for _ in range(2):
        with device_error("command", "call 0: the array ended with an error: .* a call before this one failed"):
            bench.run((good, arguments))
    anew = bench.runtime.load(bench.file)  # another array still works
    bench.runtime.run(anew, [("call", anew.sequence(bench.flat.flatten(case.plan.sequence)), arguments)], 0)


def test_unfit_calls_are_refused_before_dispatch(bench, case):
    buffers = bench.buffers(case.plan, **case.inputs)
    arguments, sequence = whole(*buffers.values()), bench.sequence(case.plan)
    y = buffers["y"]
    for wrong, message in [
        (arguments[:2], "expected 3 buffers, got 2"),
        ([*arguments[:2], (y, 0, BYTES - 4)], f"expected for buffer y {BYTES} bytes .*, got {BYTES - 4} from byte 0"),
        (
            [*arguments[:2], (y, 4, BYTES)],
            f"expected for buffer y {BYTES} bytes .*, got {BYTES} from byte 4 of {BYTES}",
        ),
        ([*arguments[:2], (y, 2**64 - 4, BYTES)], "expected for buffer y"),
        (
            [*arguments[:2], (bench.runtime.allocate(BYTES + 2), 2, BYTES)],
            ".* bytes from a multiple of 4, got 512 from byte 2",
        ),
    ]:
        with device_error("submit", "call 1: " + message):
            bench.run((sequence, arguments), (sequence, wrong))
    sequence.write(0, 1)
    with device_error("submit", "call 0: its words were changed, and make no sequence: .* no words that FlowNPU wrote"):
        bench.run((sequence, arguments))
    elsewhere = bench.runtime.load(bench.file).sequence(bench.flat.flatten(case.plan.sequence))
    with device_error("submit", "call 0: expected words for the array .*, got another's"):
        bench.run((elsewhere, arguments))
    assert bench.runtime.counts()["dispatches"] == 0
    bench.run((bench.sequence(case.plan), arguments))  # the array is as it was


def test_words_for_another_array_are_refused(bench, case, tmp_path):
    other = Bench(plan_of(RMSNorm("npu2", 2 * N).program(ROWS, 1e-6)), tmp_path)
    with device_error("artifact", "expected words for the array .*, got another's; build the model's artifacts again"):
        bench.array.sequence(other.flat.flatten(case.plan.sequence))
    with device_error("artifact", "words for the array .*: .* ends in the middle; build"):
        bench.array.sequence(bench.flat.flatten(case.plan.sequence)[:-1])


def test_unfit_array_files_are_refused(bench, tmp_path):
    with device_error("artifact", "nothing.words: .* cannot be read; build the model's artifacts again"):
        bench.runtime.load(str(tmp_path / "nothing.words"))
    (tmp_path / "half.words").write_bytes(bench.flat.words.tobytes()[:-8])
    with device_error("artifact", "half.words: .* ends in the middle"):
        bench.runtime.load(str(tmp_path / "half.words"))
    with device_error("artifact", "expected an array of npu1, got one of npu2"):
        npu.open_emulated_runtime("npu1").load(bench.file)
    with device_error("artifact", "there is no kernel scale for xdna2"):
        Bench(chain(), tmp_path)


def refusals(words, value, read):
    """The errors from reading words of which one after the other is replaced by a value."""
    for place in range(4, words.size):
        changed = words.copy()
        changed[place] = value
        try:
            read(changed)
        except npu.DeviceError as error:
            yield str(error)


def test_impossible_sequence_words_are_refused(bench, case):
    words = bench.flat.flatten(case.plan.sequence)
    for value in (-1, 2**62):
        said = list(refusals(words, value, bench.array.sequence))
        assert any("a walk has a dimension of" in text for text in said)


def test_array_file_with_impossible_values_is_refused(tmp_path):
    bench = Bench(plan_of(RMSNorm("npu2", N).program(ROWS, 1e-6)), tmp_path)

    def load(words):
        words.tofile(bench.file)
        bench.runtime.load(bench.file)

    said = " ".join(refusals(bench.flat.words, 2**40, load))
    for reason in ("bytes, of which", "reaches byte", "a stream has", "has operation", "as a variable", "as a lock"):
        assert reason in said


def test_missing_kernels_are_refused(tmp_path):
    with device_error(
        "no_device", r"expected the NPU's kernels, .* in .*libflownpu_aie_xdna2\.so: .*; install FlowNPU again"
    ):
        npu.open_emulated_runtime("npu2", str(tmp_path))
    with device_error("artifact", "expected artifacts of npu1 or npu2, got those of npu3"):
        npu.open_emulated_runtime("npu3")
