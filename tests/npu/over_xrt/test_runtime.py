# SPDX-License-Identifier: Apache-2.0
"""The runtime over XRT, below which a double of the kernel's driver runs calls on the emulator; no NPU has run it.

Every test ends with nothing open in the driver, and without having broken its rules or the array's.
"""

import errno
import gc
import os
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from flownpu.aie.designs.fused_dqp import FusedDQP
from flownpu.aie.designs.vector_operators import RMSNorm
from tests.aie.designs.cases import fused_dqp_case
from tests.forked import in_child
from tests.npu import xrt
from tests.npu.arrays import npu, read, whole
from tests.npu.driver import test_emulated_runtime as emulated
from tests.npu.driver.test_emulated_runtime import BYTES, ROWS, N, device_error
from tests.npu.firmware import DEVELOPED, FIRST

# The driver ends a call that hangs after this many ms.
WATCHDOG = 60
# Instructions of 20 MB.
MANY_WORDS = np.zeros((20 << 20) // 4, np.int64)
# States of a command (ert.h).
ERROR, ABORT, TIMEOUT = 5, 6, 8

# Where the driver is asked to move data, the array has memory of its own.
HAS_OWN_MEMORY = "separate=1" in os.environ.get(xrt.SETTINGS, "")
own_memory = pytest.mark.skipif(not HAS_OWN_MEMORY, reason="the array and the host share memory")

# The tests of the emulated runtime hold for this one: the same functions, with another bench.
test_later_call_of_dispatch_sees_earlier_results = own_memory(emulated.test_later_call_of_dispatch_sees_earlier_results)
test_input_not_moved_to_array_is_absent = own_memory(emulated.test_input_not_moved_to_array_is_absent)
test_output_not_moved_to_host_is_absent = own_memory(emulated.test_output_not_moved_to_host_is_absent)
test_buffers_begin_on_pages_and_hold_zeros = own_memory(emulated.test_buffers_begin_on_pages_and_hold_zeros)
test_moves_outside_of_buffer_are_refused = emulated.test_moves_outside_of_buffer_are_refused
test_buffers_and_arrays_work_after_their_runtime = emulated.test_buffers_and_arrays_work_after_their_runtime


# --- Results ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["npu1", "npu2"])
def test_results_equal_emulator(driver, target, rng, tmp_path):
    driver.use_kernels(target)
    case = fused_dqp_case(FusedDQP(target, 512, 16, "geglu"), 160, 300, rng)
    bench = xrt.XrtBench(case.plan, tmp_path)
    assert bench.runtime.description == f"NPU Strix, firmware {DEVELOPED.version}, XRT 2.25"
    buffers = bench.buffers(case.plan, **case.inputs)
    bench.run((bench.sequence(case.plan), whole(*buffers.values())))
    buffers["y"].to_host(0, 2 * 160)
    assert read(buffers["y"], case.plan, "y").tobytes() == case.check().tobytes()


def test_threads_share_array(driver, rng, tmp_path):
    """Calls take some milliseconds, so that those of several threads meet."""
    driver.use_kernels("npu2")
    case = fused_dqp_case(FusedDQP("npu2", 512), 4128, 512, rng)
    bench = xrt.XrtBench(case.plan, tmp_path)
    inputs = [rng.permutation(case.inputs["x"]) for _ in range(4)]

    def result(x):
        buffers = bench.buffers(case.plan, w=case.inputs["w"], x=x)
        sequence = bench.sequence(case.plan)
        for _ in range(5):
            bench.run((sequence, whole(*buffers.values())))
        buffers["y"].to_host(0, 2 * 4128)
        return read(buffers["y"], case.plan, "y").tobytes()

    with ThreadPoolExecutor(len(inputs)) as pool:
        results = list(pool.map(result, inputs))
    array = emulated.emulator(case.plan.array)
    for x, found in zip(inputs, results, strict=True):
        assert found == emulated.call(array, case.plan, w=case.inputs["w"], x=x)["y"].tobytes()
    assert bench.runtime.counts()["calls"] == 5 * len(inputs)


def test_changed_words_are_moved(bench, case, arguments):
    """The same norm with another epsilon; only instructions from the first to the last changed one are moved."""
    other = emulated.plan_of(RMSNorm("npu2", N).program(ROWS, 0.5))
    words, others = (xrt.halves(bench.flat.flatten(plan.sequence)) for plan in (case.plan, other))
    differing = np.flatnonzero(words != others)
    array = emulated.emulator(case.plan.array)
    expected = [emulated.call(array, plan, **case.inputs)["y"].tobytes() for plan in (case.plan, other)]
    sequence = bench.sequence(case.plan)
    y = arguments[2][0]
    sent = [4 * len(words), 4 * int(np.ptp(differing) + 1), 0]
    for number, now in enumerate([words, others, others]):
        for word in differing:
            sequence.write(int(word), int(now[word]))
        bench.run((sequence, arguments))
        y.to_host(0, BYTES)
        assert read(y, case.plan, "y").tobytes() == expected[min(number, 1)]
        assert bench.runtime.counts()["word_bytes"] == sum(sent[: number + 1])
    with pytest.raises(RuntimeError, match=f"a sequence has {len(words)} words, got word {len(words)}"):
        sequence.write(len(words), 0)
    for value in (-1, 2**32):
        with device_error("artifact", f"expected instructions of 32 bits for the NPU, got {value}; build the designs"):
            sequence.write(0, value)


def test_everything_is_counted(bench, case, arguments):
    counts = bench.runtime.counts()
    given = 2 * BYTES + 2 * N
    assert counts == {
        "dispatches": 0, "calls": 0, "bytes_to_device": given, "bytes_to_host": 0, "word_bytes": 0,
        "buffer_bytes": given,
    }  # fmt: skip
    sequences = [bench.sequence(case.plan) for _ in range(2)]
    for _ in range(3):
        bench.run(*[(sequence, arguments) for sequence in sequences])
    arguments[2][0].to_host(0, 10)
    assert bench.runtime.counts() == counts | {
        "dispatches": 3, "calls": 6, "bytes_to_host": 10,
        "word_bytes": 2 * 4 * len(xrt.halves(bench.flat.flatten(case.plan.sequence))),
    }  # fmt: skip


def test_same_call_twice_in_dispatch_runs(bench, case, arguments):
    sequence = bench.sequence(case.plan)
    bench.run((sequence, arguments), (sequence, arguments))


# --- Lifetimes --------------------------------------------------------------------------------------------------------


def test_slow_call_is_waited_for(bench, case, driver):
    driver.inject("delay", 20_000)
    buffers = bench.buffers(case.plan, **case.inputs)
    bench.run((bench.sequence(case.plan), whole(*buffers.values())))
    buffers["y"].to_host(0, BYTES)
    assert read(buffers["y"], case.plan, "y").tobytes() == case.check().tobytes()


def give_up(bench, driver, sequence, arguments):
    """Runs a call that hangs, and still does after the caller got the error."""
    driver.inject("hang", -1)
    with device_error("timeout", "call 0"):
        bench.run((sequence, arguments), limit=1)


def test_words_of_call_under_way_stay_as_they_are(bench, case, arguments, driver):
    sequence = bench.sequence(case.plan)
    give_up(bench, driver, sequence, arguments)
    with device_error("submit", "word 0 of a sequence: its instructions cannot be changed while it is under way"):
        sequence.write(0, 0)
    driver.end_hung_calls()
    driver.settle()
    npu.open_xrt_runtime()  # frees calls that were given up and have ended
    sequence.write(0, 0)


@own_memory
def test_early_transfer_is_seen_by_driver(bench, case, arguments, driver):
    give_up(bench, driver, bench.sequence(case.plan), arguments)
    arguments[2][0].to_device(0, BYTES)
    assert driver.violations() == ["a buffer was moved that a call under way uses"]
    driver.reset()
    driver.end_hung_calls()


def open_files():
    return len(list(Path("/proc/self/fd").iterdir()))


def test_sessions_leave_nothing(driver, case, tmp_path):
    """Each opens the device, loads the array, runs a call and closes; every other one drops array and runtime first.

    It was run once with FLOWNPU_SESSIONS=1000."""
    files = 0
    for number in range(int(os.environ.get("FLOWNPU_SESSIONS", "30"))):
        bench = xrt.XrtBench(case.plan, tmp_path)
        arguments = whole(*bench.buffers(case.plan, **case.inputs).values())
        bench.run((bench.sequence(case.plan), arguments))
        if number % 2 == 1:
            bench.array = bench.runtime = None
        del bench, arguments
        if number == 0:
            files = open_files()  # XRT keeps some of its own
    assert driver.alive() == 0
    assert open_files() == files


# --- Faults -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "number", "failure", "message"),
    [
        ("open", errno.ENODEV, "no_device", "Open /dev/accel/accel0 failed .*: No such device; load the driver"),
        ("open", errno.EACCES, "permission", r"Permission denied; join the group .*sudo usermod -aG render \"\$USER\""),
        ("lock memory", errno.EAGAIN, "permission", "mmap.* failed .*; the driver locks memory, .*memlock"),
        ("heap", errno.ENOMEM, "permission", "CREATE_BO .*; the driver locks memory, .*memlock"),
        ("heap", errno.ENOTTY, "version", r"Inappropriate ioctl.*; XRT 2\.19 or newer is needed, .*`flownpu doctor"),
        ("version", (2 << 16) + 18, "version", r"expected XRT 2\.19 or newer, found 2\.18; XRT .*`flownpu doctor"),
    ],
)
def test_device_that_cannot_be_opened_is_named(driver, fault, number, failure, message):
    driver.inject(fault, number)
    with device_error(failure, r"\[FlowNPU\] device 'npu': .*" + message):
        npu.open_xrt_runtime()
    driver.reset()
    # XRT may have lost the device's folder in sysfs, where its name is.
    assert re.match("(NPU Strix|an NPU)(, firmware .*)?, XRT 2.25", npu.open_xrt_runtime().description)


@pytest.mark.parametrize(
    ("number", "failure", "message"),
    [
        (errno.EINVAL, "artifact", r"IOCTL failed .*; build the designs for this NPU anew \(`flownpu build MODEL"),
        (errno.EACCES, "permission", "usermod"),
        (errno.ENOSPC, "memory", "close other programs that use the NPU"),
        (errno.EBUSY, "memory", "close other programs that use the NPU"),
    ],
)
def test_array_without_context_is_named(bench, driver, number, failure, message):
    driver.inject("context", number)
    with device_error(failure, re.escape(bench.file) + " on NPU Strix, .*: .*" + message):
        bench.runtime.load(bench.file)
    bench.runtime.load(bench.file)


NEEDED = (
    r"Operation not supported; XRT 2\.19 or newer is needed, and .* firmware of the NPU of its age: `flownpu doctor"
)


@pytest.mark.parametrize("fault", ["context", "submit"])
def test_firmware_without_request_is_named(driver, case, tmp_path, fault):
    """The driver takes the firmware; the error has its version, what is needed, and what tells more."""
    driver.use_firmware(FIRST)
    bench = xrt.XrtBench(case.plan, tmp_path)
    arguments = whole(*bench.buffers(case.plan, **case.inputs).values())
    sequence = bench.sequence(case.plan)
    driver.inject(fault, errno.EOPNOTSUPP)
    what = re.escape(bench.file) if fault == "context" else "call 0"
    with device_error("version", rf"{what} on NPU Strix, firmware 1\.0\.0\.63, XRT 2\.25: .*{NEEDED}"):
        bench.runtime.load(bench.file) if fault == "context" else bench.run((sequence, arguments))


def test_unfit_xclbin_files_are_refused(bench, tmp_path):
    content = (tmp_path / f"{bench.flat.identity}.xclbin").read_bytes()
    for name, wrong in [("half", content[: len(content) // 2]), ("short", content[:10]), ("other", b"{}" + content)]:
        (tmp_path / name).write_bytes(wrong)
        with device_error("artifact", rf"/{name} on NPU Strix.*: .*; build the designs for this NPU anew"):
            bench.runtime.load(str(tmp_path / name))
    with device_error("artifact", "/nothing on NPU Strix.*: No such file .*; build the designs"):
        bench.runtime.load(str(tmp_path / "nothing"))
    with device_error("artifact", "words for the array .*: expected instructions, got none"):
        bench.array.sequence(np.zeros(0, np.int64))


@pytest.mark.usefixtures("driver")
def test_call_with_surplus_buffers_is_refused(case, tmp_path):
    """Refused before XRT 2.25 sees it, which does not check an argument's number, so that the process would end."""
    bench = xrt.XrtBench(case.plan, tmp_path, buffers=2)
    arguments = whole(*bench.buffers(case.plan, **case.inputs).values())
    with device_error("submit", "call 0: the array .*xclbin takes 2 buffers, and the call has 3"):
        bench.run((bench.sequence(case.plan), arguments))


@pytest.mark.parametrize("number", range(5))
@pytest.mark.parametrize("code", [errno.ENOMEM, errno.ENOSPC])
def test_failed_buffer_frees_earlier_ones(bench, case, driver, number, code):
    """Three buffers, and one for each sequence's instructions; what was made before is freed."""
    made = []
    driver.inject("allocate", code, after=number)
    before = bench.runtime.counts()["buffer_bytes"]
    what = "words for the array" if number >= 3 else r"a buffer of \d+ bytes on the NPU"
    with device_error("memory", what + ".*: DRM_IOCTL_AMDXDNA_CREATE_BO .*; use a smaller context"):
        made.extend(bench.runtime.allocate(record.type.bytes) for record in case.plan.sequence.buffers)
        made.extend(bench.sequence(case.plan) for _ in range(2))
    # The array's configuration is one more, in the heap.
    assert driver.alive("buffer") + driver.alive("heap buffer") == 1 + number
    made.clear()
    assert bench.runtime.counts()["buffer_bytes"] == before
    assert driver.alive("buffer") + driver.alive("heap buffer") == 1


@pytest.mark.parametrize("size", [0, 2**46, 2**63 + 1])
def test_buffers_of_impossible_size_are_refused(bench, size):
    with device_error("memory", f"a buffer of {size} bytes on the NPU: "):
        bench.runtime.allocate(size)
    assert bench.runtime.counts()["buffer_bytes"] == 0


def test_too_little_lockable_memory_is_named(bench, driver):
    driver.inject("allocate", errno.EAGAIN)
    with device_error("permission", "a buffer of 8 bytes .*; the driver locks memory, "):
        bench.runtime.allocate(8)


def test_heap_grows_beyond_64_megabytes(bench):
    """Instructions of 80 MB, where the first part of XRT's heap has 64."""
    sequences = [bench.array.sequence(MANY_WORDS) for _ in range(4)]
    assert len(sequences) == 4


def test_heap_of_old_firmware_does_not_grow(case, driver, tmp_path):
    """There a context has only the first part of the heap, and no context is made once there are more parts."""
    driver.use_firmware(FIRST)
    bench = xrt.XrtBench(case.plan, tmp_path)
    sequences = [bench.array.sequence(MANY_WORDS) for _ in range(3)]
    for _ in range(2):
        with device_error(
            "version", rf"words for the array .* on NPU Strix, firmware 1\.0\.0\.63, XRT 2\.25: .*{NEEDED}"
        ):
            bench.array.sequence(MANY_WORDS)
    with device_error("version", rf"xclbin on NPU Strix, firmware 1\.0\.0\.63, XRT 2\.25: .*{NEEDED}"):
        bench.runtime.load(bench.file)
    assert len(sequences) == 3


@own_memory
def test_failed_transfer_is_named(bench, driver):
    buffer = bench.runtime.allocate(8)
    driver.inject("move", errno.EIO)
    with device_error("submit", "a transfer of 8 bytes: DRM_IOCTL_AMDXDNA_SYNC_BO .*"):
        buffer.to_device(0, 8)
    assert bench.runtime.counts()["bytes_to_device"] == 0


# How a call may be refused.
REQUESTS = {
    errno.EINVAL: ("submit", "the driver's message is in `sudo dmesg`"),
    errno.EACCES: ("permission", "join the group"),
    errno.EAGAIN: ("permission", "the driver locks memory"),
    errno.ENOMEM: ("memory", "use a smaller context"),
    errno.EOPNOTSUPP: ("version", r"XRT 2\.19 or newer is needed"),
    errno.ENODEV: ("no_device", "`flownpu doctor` tells"),
}


@pytest.mark.parametrize(("calls", "after"), [(1, 0), (3, 0), (50, 1), (50, 2)])
@pytest.mark.parametrize("number", REQUESTS)
def test_refused_call_is_named(bench, case, arguments, driver, number, calls, after):
    """XRT submits a list 24 calls at a time: the second and the third part are refused when others are under way."""
    failure, message = REQUESTS[number]
    sequence = bench.sequence(case.plan)
    driver.inject("submit", number, after=after)
    with device_error(failure, f"call 0.*: DRM_IOCTL_AMDXDNA_EXEC_CMD .*; .*{message}"):
        bench.run(*[(sequence, arguments)] * calls)
    assert bench.runtime.counts()["dispatches"] == 0
    if calls == 1:  # if there are several, some may have run
        bench.run((sequence, arguments))


@pytest.mark.parametrize(("calls", "after"), [(1, 0), (3, 0), (3, 3)])
def test_missing_command_memory_is_named(bench, case, arguments, driver, calls, after):
    """Each call has a command, and a list one more; nothing was submitted."""
    sequence = bench.sequence(case.plan)
    driver.inject("command", errno.ENOMEM, after=after)
    with device_error("memory", "call 0.*: DRM_IOCTL_AMDXDNA_CREATE_BO .*; use a smaller context"):
        bench.run(*[(sequence, arguments)] * calls)


@pytest.mark.parametrize("calls", [1, 3])
@pytest.mark.parametrize(
    ("state", "failure", "message"),
    [
        (ERROR, "command", "the array ended with an error: "),
        (ABORT, "command", "the array ended with an error: "),
        (TIMEOUT, "timeout", r"the driver's watchdog ended it \(timeout\): "),
    ],
)
def test_call_ending_with_error_is_named(bench, case, arguments, driver, state, failure, message, calls):
    """The call is named, the dispatch counts, and another context of the same xclbin works."""
    sequence = bench.sequence(case.plan)
    driver.inject("error", state, after=calls - 1)
    with device_error(failure, rf"\[FlowNPU\] call {calls - 1}: {message}.*; close the session and make it again$"):
        bench.run(*[(sequence, arguments)] * calls)
    counts = bench.runtime.counts()
    assert (counts["dispatches"], counts["calls"]) == (1, calls)
    bench.array = bench.runtime.load(bench.file)
    bench.run((bench.sequence(case.plan), arguments))


def test_deadlock_is_found_by_driver(bench, case, arguments, capfd):
    bad = bench.sequence(emulated.without(case.plan, "weight"))
    with device_error("command", r"call 1: the array ended with an error: .*; the driver's message is in .*again$"):
        bench.run((bench.sequence(case.plan), arguments), (bad, arguments))
    assert "[emulator] deadlock: " in capfd.readouterr().err  # instead of dmesg


@pytest.mark.parametrize("fault", ["error", "hang"])
@pytest.mark.parametrize("failing", [0, 23, 24, 30, 49])
def test_failure_inside_long_list_is_named(bench, case, arguments, driver, failing, fault):
    """XRT submits 24 calls at a time."""
    sequence = bench.sequence(case.plan)
    driver.inject(fault, ERROR if fault == "error" else WATCHDOG, after=failing)
    with device_error("command" if fault == "error" else "timeout", rf"\[FlowNPU\] call {failing}: the "):
        bench.run(*[(sequence, arguments)] * 50, limit=2000)


def test_long_list_of_calls_equals_emulator(bench, case, arguments):
    sequence = bench.sequence(case.plan)
    bench.run(*[(sequence, arguments)] * 50)
    arguments[2][0].to_host(0, BYTES)
    assert read(arguments[2][0], case.plan, "y").tobytes() == case.check().tobytes()


@pytest.mark.parametrize("calls", [1, 3])
def test_hanging_call_times_out(bench, case, arguments, driver, calls):
    """The caller gets the error once the driver's watchdog has ended the call, which uses its buffers until then."""
    sequence = bench.sequence(case.plan)
    driver.inject("hang", WATCHDOG, after=calls - 1)
    name = "call 0" if calls == 1 else "call 0 .. call 2"
    with device_error("timeout", rf"{name}: the array did not answer within 7 ms \(timeout\); .*make it again$"):
        bench.run(*[(sequence, arguments)] * calls, limit=7)


@pytest.mark.parametrize("calls", [1, 3])
def test_call_ended_by_watchdog_is_named(bench, case, arguments, driver, calls):
    """The driver says which call it was; the next session works."""
    sequence = bench.sequence(case.plan)
    driver.inject("hang", WATCHDOG, after=calls - 1)
    with device_error("timeout", rf"call {calls - 1}: the driver's watchdog ended it \(timeout\): .*make it again$"):
        bench.run(*[(sequence, arguments)] * calls, limit=2000)
    bench.array = bench.runtime.load(bench.file)
    bench.run((bench.sequence(case.plan), arguments))


@pytest.mark.parametrize("fault", ["hang", "lost"])
@pytest.mark.parametrize(("calls", "failing"), [(1, 0), (3, 1)])
def test_call_that_never_ends_is_given_up(bench, case, driver, fault, calls, failing):
    """Nothing waits forever for the call, and its memory is freed only after its end; the process continues."""
    arguments = whole(*bench.buffers(case.plan, **case.inputs).values())
    driver.inject(fault, -1, after=failing)
    expected = ("timeout", "did not answer within 20 ms") if fault == "hang" else ("no_device", "the NPU is gone: ")
    with device_error(expected[0], "call 0.*: .*" + expected[1]):
        limit = 20 if fault == "hang" else 2000  # it is lost once the call has begun
        bench.run(*[(bench.sequence(case.plan), arguments)] * calls, limit=limit)
    del arguments
    bench.array = bench.runtime = None
    gc.collect()  # the error's traceback has them
    # The configuration and the instructions are in the heap.
    assert (driver.alive("buffer"), driver.alive("heap buffer"), driver.alive("context")) == (3, 2, 1)
    driver.end_hung_calls()
    driver.settle()
    npu.open_xrt_runtime()  # frees calls that were given up and have ended
    assert driver.alive() == 0


@pytest.mark.parametrize(("calls", "failing"), [(1, 0), (24, 12)])
def test_lost_device_is_noticed_early(bench, case, arguments, driver, calls, failing):
    """24 calls are submitted at once, so no later request can show the loss by its refusal."""
    driver.inject("lost", after=failing)
    begin = time.monotonic()
    with device_error("no_device", "call 0.*: the NPU is gone: .*No such device"):
        bench.run(*[(bench.sequence(case.plan), arguments)] * calls, limit=30_000)
    assert time.monotonic() - begin < 10  # a third of the time is enough for any machine
    driver.end_hung_calls()


def test_wrong_result_is_error(bench, case, arguments):
    with device_error("command", "call 0: the array ended with an error: "):
        bench.run((bench.sequence(case.plan), arguments[:2]))


def test_unfit_calls_are_refused(bench, case, arguments):
    sequence = bench.sequence(case.plan)
    y = arguments[2][0]
    for wrong in [(y, 4, BYTES), (y, 2**64 - 4, BYTES), (y, 2, 4), (y, 0, 0)]:
        with device_error("submit", f"call 1: expected bytes of a buffer of {BYTES} from a multiple of 4, got "):
            bench.run((sequence, arguments), (sequence, [*arguments[:2], wrong]))
    with device_error("submit", "expected calls, got none"):
        bench.run()
    other = bench.runtime.load(bench.file).sequence(xrt.halves(bench.flat.flatten(case.plan.sequence)))
    with device_error("submit", "call 0: expected words for the array .*, got another's"):
        bench.run((other, arguments))
    assert bench.runtime.counts()["dispatches"] == 0
    bench.run((sequence, arguments))


def test_fork_child_leaves_buffers_of_parent(driver, bench, case, arguments):
    """A freed buffer would be the parent's, too, because both have the same open file."""
    alive = driver.alive()
    made = [bench.sequence(case.plan), bench.runtime, arguments]

    def work():
        with device_error("forked", "device 'npu' was opened before this process was forked") as raised:
            made[1].allocate(64)
        text = str(raised.value)
        made.clear()
        vars(bench).clear()
        gc.collect()
        return text, driver.alive()

    text, alive_in_child = in_child(work)
    assert "'spawn'" in text
    assert alive_in_child == alive + 1
    bench.run((made[0], arguments))
