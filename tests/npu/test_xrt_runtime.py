# SPDX-License-Identifier: Apache-2.0
"""The runtime over XRT, with a double of libxrt_coreutil that runs calls on the emulator; no NPU has run it.

Every test ends with no object of XRT alive, and with nothing done that XRT or the array does not bear.
"""

import errno
import faulthandler
import gc
import os
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest

from flownpu.aie.designs.fused_dqp import FusedDQP
from flownpu.aie.designs.vector_operators import RMSNorm
from scripts import xrt_headers
from tests.aie.cases import fused_dqp_case
from tests.aie.host_kernels import BUILT
from tests.npu import test_emulated_runtime as emulated
from tests.npu import xrt
from tests.npu.arrays import npu, read, whole
from tests.npu.test_emulated_runtime import BYTES, ROWS, N, device_error

# A test that hangs ends the process; the longest takes a few seconds.
HANG_SECONDS = 120
# After so many ms the driver was seen to end a call that hung.
WATCHDOG = 6144
# States of a command (ert.h).
ERROR, ABORT, TIMEOUT = 5, 6, 8

case = emulated.case
# What holds of the emulated runtime holds of this one: the same tests, with another bench.
test_calls_of_a_dispatch = emulated.test_calls_of_a_dispatch_see_what_those_before_left
test_threads_share_an_array = emulated.test_threads_share_an_array
test_what_was_not_moved_to_the_array = emulated.test_what_was_not_moved_to_the_array_is_not_there
test_what_was_not_moved_to_the_host = emulated.test_what_was_not_moved_to_the_host_is_not_there
test_buffers_begin_on_pages = emulated.test_buffers_begin_on_pages_and_hold_zeros
test_moves_outside_of_a_buffer = emulated.test_moves_outside_of_a_buffer
test_no_buffer_is_left = emulated.test_no_buffer_is_left_when_all_are_dropped
test_what_outlives_its_runtime = emulated.test_buffers_and_arrays_may_outlive_their_runtime
test_a_failure_that_nobody_waits_for = emulated.test_a_failure_that_nobody_waits_for


@pytest.fixture
def double():
    """The double, which must be left as it was found."""
    xrt.require()
    double = xrt.Double()
    faulthandler.dump_traceback_later(HANG_SECONDS, exit=True, file=sys.__stderr__)  # sys.stderr may be captured
    yield double
    faulthandler.cancel_dump_traceback_later()
    if double.alive():
        gc.collect()  # tracebacks of expected errors keep what was there when they were raised
    assert double.violations() == []
    assert double.alive() == 0


@pytest.fixture
def bench(double, case, tmp_path):
    double.use_kernels("npu2")
    bench = xrt.XrtBench(case.plan, tmp_path)
    yield bench
    vars(bench).clear()  # pytest keeps fixtures until all are torn down


@pytest.fixture
def arguments(bench, case):
    """All of the call's buffers."""
    arguments = whole(*bench.buffers(case.plan, **case.inputs).values())
    yield arguments
    arguments.clear()


# --- Results ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["npu1", "npu2"])
def test_results_are_the_emulators(double, target, rng, tmp_path):
    double.use_kernels(target)
    case = fused_dqp_case(FusedDQP(target, 512, 16, "geglu"), 160, 300, rng)
    bench = xrt.XrtBench(case.plan, tmp_path)
    assert bench.runtime.description == "NPU double, XRT 2.25"
    buffers = bench.buffers(case.plan, **case.inputs)
    bench.run((bench.sequence(case.plan), whole(*buffers.values())))
    buffers["y"].to_host(0, 2 * 160)
    assert read(buffers["y"], case.plan, "y").tobytes() == case.check().tobytes()
    assert double.alive("run") == 0


def test_words_that_are_changed_are_moved(bench, case, arguments):
    """The same norm with another epsilon; of a call's instructions only what lies between changes is moved."""
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


def test_one_call_may_be_twice_in_a_dispatch(bench, case, arguments, double):
    sequence = bench.sequence(case.plan)
    submission = bench.submit((sequence, arguments), (sequence, arguments))
    assert double.alive("run") == 2
    submission.wait(1000)
    submission.wait(1000)


# --- Lifetimes --------------------------------------------------------------------------------------------------------


def test_what_a_call_under_way_uses_stays(bench, case, double):
    """The double runs calls when they are waited for: here long after all else is dropped."""
    arguments = whole(*bench.buffers(case.plan, **case.inputs).values())
    submission = bench.submit((bench.sequence(case.plan), arguments))
    del arguments
    bench.array = bench.runtime = None
    assert double.alive("buffer") == 4
    submission.wait(1000)
    del submission
    assert double.alive() == 0


def test_a_submission_that_is_dropped_is_waited_for(bench, case, double):
    buffers = bench.buffers(case.plan, **case.inputs)
    bench.submit((bench.sequence(case.plan), whole(*buffers.values())))
    buffers["y"].to_host(0, BYTES)
    assert read(buffers["y"], case.plan, "y").tobytes() == case.check().tobytes()
    assert double.alive("run") == 0


def test_words_of_a_call_under_way_stay_as_they_are(bench, case, arguments):
    sequence = bench.sequence(case.plan)
    submission = bench.submit((sequence, arguments))
    with device_error("submit", "word 0 of a sequence: its instructions cannot be changed while it is under way"):
        sequence.write(0, 0)
    submission.wait(1000)
    sequence.write(0, 0)


def test_the_double_sees_a_buffer_that_is_moved_too_early(bench, case, arguments, double):
    submission = bench.submit((bench.sequence(case.plan), arguments))
    arguments[2][0].to_host(0, BYTES)
    assert double.violations() == ["a buffer was moved that a call under way uses"]
    double.reset()
    submission.wait(1000)


def test_a_thousand_sessions_leave_nothing(double, case, tmp_path):
    """Each opens the device, loads the array, runs a call and closes; some in another order than the reverse."""
    for number in range(1000):
        bench = xrt.XrtBench(case.plan, tmp_path)
        arguments = whole(*bench.buffers(case.plan, **case.inputs).values())
        submission = bench.submit((bench.sequence(case.plan), arguments))
        if number % 3 == 0:
            submission.wait(1000)
        if number % 3 == 1:
            bench.array = bench.runtime = None
        del bench, arguments, submission
    assert double.alive() == 0


# --- Faults -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "number", "failure", "message"),
    [
        ("devices", 0, "no_device", r"XRT finds no NPU; load the driver \(sudo modprobe amdxdna\)"),
        ("open", errno.ENODEV, "no_device", "Failed to open KMQ device: No such device; load the driver"),
        ("open", errno.EACCES, "permission", r"Permission denied; join the group .*sudo usermod -aG render \$USER"),
        ("open", errno.EAGAIN, "permission", "Resource temporarily unavailable; the driver locks memory: .*ulimit -l"),
        ("open", errno.ENOTTY, "version", r"Inappropriate ioctl.*; install XRT 2\.19 or newer and the driver"),
        ("version", (2 << 16) + 18, "version", r"expected XRT 2\.19 or newer, found 2\.18; install XRT"),
    ],
)
def test_a_device_that_cannot_be_opened(double, fault, number, failure, message):
    double.inject(fault, number)
    with device_error(failure, r"\[FlowNPU\] device 'npu': .*" + message):
        npu.open_xrt_runtime()
    double.reset()
    npu.open_xrt_runtime()


@pytest.mark.parametrize(
    ("number", "failure", "message"),
    [
        (errno.EINVAL, "artifact", r"IOCTL failed: .*; build the designs for this NPU anew \(`flownpu build MODEL"),
        (errno.EACCES, "permission", "usermod"),
        (errno.ENOSPC, "memory", "close other programs that use the NPU"),
        (errno.EBUSY, "memory", "close other programs that use the NPU"),
    ],
)
def test_an_array_that_gets_no_context(bench, double, number, failure, message):
    double.inject("context", number)
    with device_error(failure, re.escape(bench.file) + ": .*" + message):
        bench.runtime.load(bench.file)
    bench.runtime.load(bench.file)


def test_files_that_are_no_xclbin(bench, tmp_path):
    content = (tmp_path / f"{bench.flat.identity}.xclbin").read_bytes()
    for name, wrong, message in [
        ("half", content[:-8], "Invalid xclbin: it is cut off"),
        ("short", content[:10], "Invalid xclbin"),
        ("other", b"{}" + content, "Invalid xclbin"),
    ]:
        (tmp_path / name).write_bytes(wrong)
        with device_error("artifact", rf"/{name}: {message}.*; build the designs for this NPU anew"):
            bench.runtime.load(str(tmp_path / name))
    with device_error("artifact", "/nothing: No such file .*; build the designs"):
        bench.runtime.load(str(tmp_path / "nothing"))
    with device_error("artifact", "words for the array .*: expected instructions, got none"):
        bench.array.sequence(np.zeros(0, np.int64))


@pytest.mark.parametrize("number", range(5))
@pytest.mark.parametrize("code", [errno.ENOMEM, errno.ENOSPC])
def test_the_nth_buffer_is_not_to_be_had(bench, case, double, number, code):
    """Three buffers, and one for each sequence's instructions; what was made before is freed."""
    made = []
    double.inject("allocate", code, after=number)
    before = bench.runtime.counts()["buffer_bytes"]
    what = "words for the array" if number >= 3 else r"a buffer of \d+ bytes on the NPU"
    with device_error("memory", what + ".*: DRM_IOCTL_AMDXDNA_CREATE_BO .*; use a smaller context"):
        made.extend(bench.runtime.allocate(record.type.bytes) for record in case.plan.sequence.buffers)
        made.extend(bench.sequence(case.plan) for _ in range(2))
    assert double.alive("buffer") == number
    made.clear()
    assert bench.runtime.counts()["buffer_bytes"] == before
    assert double.alive("buffer") == 0


@pytest.mark.parametrize("size", [0, 2**46, 2**63 + 1])
def test_buffers_of_no_good_size(bench, size):
    with device_error("memory", f"a buffer of {size} bytes on the NPU: "):
        bench.runtime.allocate(size)
    assert bench.runtime.counts()["buffer_bytes"] == 0


def test_too_little_memory_may_be_locked(bench, double):
    double.inject("allocate", errno.EAGAIN)
    with device_error("permission", "a buffer of 8 bytes .*; the driver locks memory: "):
        bench.runtime.allocate(8)


def test_a_move_that_fails(bench, double):
    buffer = bench.runtime.allocate(8)
    double.inject("move", errno.EIO)
    with device_error("submit", "a transfer of 8 bytes: DRM_IOCTL_AMDXDNA_SYNC_BO .*"):
        buffer.to_device(0, 8)
    assert bench.runtime.counts()["bytes_to_device"] == 0


@pytest.mark.parametrize("calls", [1, 3])
def test_a_call_that_is_not_accepted(bench, case, arguments, double, calls):
    sequence = bench.sequence(case.plan)
    double.inject("submit", errno.EINVAL)
    with device_error("submit", "call 0.*: DRM_IOCTL_AMDXDNA_EXEC_CMD .*; the driver's message is in `sudo dmesg`"):
        bench.submit(*[(sequence, arguments)] * calls)
    assert bench.runtime.counts()["dispatches"] == 0
    assert double.alive("run") == 0
    if calls == 1:
        bench.run((sequence, arguments))
    else:  # of several some may have run
        with device_error(
            "submit", "the array is in an unknown state since call 0 .. call 2 failed; close the session"
        ):
            bench.run((sequence, arguments))


@pytest.mark.parametrize("calls", [1, 3])
@pytest.mark.parametrize(
    ("state", "failure", "message"),
    [
        (ERROR, "command", "the array ended with an error: the double was told so"),
        (ABORT, "command", "the array ended with an error: "),
        (TIMEOUT, "timeout", r"the driver's watchdog ended it \(timeout\): "),
    ],
)
def test_a_call_that_ends_with_an_error(bench, case, arguments, double, state, failure, message, calls):
    """The call is named, the array takes no more, and another context of the same xclbin works."""
    sequence = bench.sequence(case.plan)
    double.inject("error", state, after=calls - 1)
    submission = bench.submit(*[(sequence, arguments)] * calls)
    for _ in range(2):
        with device_error(failure, rf"\[FlowNPU\] call {calls - 1}: {message}.*; close the session and make it again$"):
            submission.wait(1000)
    with device_error("submit", f"call 0: the array is in an unknown state since call {calls - 1} failed"):
        bench.submit((sequence, arguments))
    anew = bench.runtime.load(bench.file)
    words = xrt.halves(bench.flat.flatten(case.plan.sequence))
    bench.runtime.submit(anew, [("call", anew.sequence(words), arguments)]).wait(1000)


def test_a_deadlock_is_found_by_the_double(bench, case, arguments):
    bad = bench.sequence(emulated.without(case.plan, "weight"))
    submission = bench.submit((bench.sequence(case.plan), arguments), (bad, arguments))
    with device_error("command", r"(?s)call 1: the array ended with an error: \[emulator\] deadlock: .*weight.*again$"):
        submission.wait(1000)


@pytest.mark.parametrize("calls", [1, 3])
def test_a_call_that_hangs(bench, case, arguments, double, calls):
    """The caller is told after its timeout; what the call uses stays until the driver's watchdog has ended it."""
    sequence = bench.sequence(case.plan)
    double.inject("hang", WATCHDOG, after=calls - 1)
    submission = bench.submit(*[(sequence, arguments)] * calls)
    name = "call 0" if calls == 1 else "call 0 .. call 2"
    for _ in range(2):
        with device_error("timeout", rf"{name}: the array did not answer within 7 ms \(timeout\); .*make it again$"):
            submission.wait(7)
    assert double.alive("run") == calls
    with device_error("submit", f"the array is in an unknown state since {name} failed"):
        bench.submit((sequence, arguments))
    del submission
    assert double.alive("run") == 0


@pytest.mark.parametrize("fault", ["hang", "lost"])
@pytest.mark.parametrize("calls", [1, 3])
def test_a_call_that_never_ends(bench, case, double, fault, calls):
    """Nothing waits for it for ever, or is freed under it; the process goes on; and once it ends all is freed."""
    arguments = whole(*bench.buffers(case.plan, **case.inputs).values())
    double.inject(fault, -1)
    submission = bench.submit(*[(bench.sequence(case.plan), arguments)] * calls)
    with device_error("timeout" if fault == "hang" else "no_device", "call 0.*: "):
        submission.wait(5)
    del submission, arguments
    bench.array = bench.runtime = None
    assert double.alive("run") == calls
    assert double.alive("buffer") == 4
    assert double.alive("context") == 1
    double.end_hung_calls()
    npu.open_xrt_runtime()  # looks after what was left
    assert double.alive() == 0


@pytest.mark.parametrize(
    ("fewer", "message"),
    [(4, r"buffer y has \d+ bytes, and needs \d+"), (None, "a call has 2 buffers, and needs 3")],
)
def test_a_result_of_the_wrong_size(bench, case, arguments, fewer, message):
    wrong = arguments[:2] if fewer is None else [*arguments[:2], (arguments[2][0], 0, BYTES - fewer)]
    submission = bench.submit((bench.sequence(case.plan), wrong))
    with device_error("command", f"call 0: the array ended with an error: {message}; "):
        submission.wait(1000)


def test_calls_that_do_not_fit_are_refused(bench, case, arguments):
    sequence = bench.sequence(case.plan)
    y = arguments[2][0]
    for wrong in [(y, 4, BYTES), (y, 2**64 - 4, BYTES), (y, 2, 4), (y, 0, 0)]:
        with device_error("submit", f"call 1: expected bytes of a buffer of {BYTES} from a multiple of 4, got "):
            bench.submit((sequence, arguments), (sequence, [*arguments[:2], wrong]))
    with device_error("submit", "expected calls, got none"):
        bench.submit()
    other = bench.runtime.load(bench.file).sequence(xrt.halves(bench.flat.flatten(case.plan.sequence)))
    with device_error("submit", "call 0: expected words for the array .*, got another's"):
        bench.submit((other, arguments))
    assert bench.runtime.counts()["dispatches"] == 0
    bench.run((sequence, arguments))


# --- Without XRT ------------------------------------------------------------------------------------------------------

OPEN = """
from tests.npu.arrays import npu
try:
    npu.open_xrt_runtime({!r})
except npu.DeviceError as error:
    print(error.failure, error)
"""


def open_elsewhere(plugin, **environment):
    """What a process says that has no double."""
    done = subprocess.run(
        [sys.executable, "-c", OPEN.format(str(plugin))],
        # What a sanitizer needs (Makefile) stays; the rest is bare.
        env={name: os.environ[name] for name in ("LD_PRELOAD", "ASAN_OPTIONS") if name in os.environ}
        | environment
        | {"PYTHONPATH": ".", "FLOWNPU_TESTING_DIR": str(BUILT.resolve())},
        capture_output=True,
        text=True,
        check=False,
        timeout=HANG_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_without_the_plugin(tmp_path):
    said = open_elsewhere(tmp_path / "libflownpu_xrt.so")
    assert re.match(
        r"version \[FlowNPU\] device 'npu': this build of FlowNPU has no .*libflownpu_xrt.so; install XRT", said
    )


@pytest.mark.usefixtures("double")
def test_without_xrt():
    said = open_elsewhere(xrt.PLUGIN)
    if "device 'npu': XRT finds no NPU" in said or "XRT 2." in said:
        pytest.skip("XRT is installed on this machine")
    assert re.match(
        r"version .*: XRT is not installed \(libxrt_coreutil.so.2: .*\); install it \(Debian: libxrt2", said
    )


@pytest.mark.usefixtures("double")
def test_an_xrt_without_what_is_needed(tmp_path):
    """A library of XRT's name that has none of the symbols."""
    shutil.copy(BUILT / "libflownpu_aie_xdna.so", tmp_path / "libxrt_coreutil.so.2")
    said = open_elsewhere(xrt.PLUGIN, LD_LIBRARY_PATH=str(tmp_path))
    assert re.match(
        r"version .*: the installed XRT does not fit this build \(.*undefined symbol: .*\); install XRT 2", said
    )


def test_a_plugin_that_is_none():
    said = open_elsewhere(BUILT.resolve() / "libflownpu_aie_xdna.so")
    assert re.match("version .*libflownpu_aie_xdna.so is no plugin of FlowNPU; install FlowNPU again", said)


# --- The real library -------------------------------------------------------------------------------------------------


def symbols(file, kind):
    """Names of XRT's symbols that a library defines, or does not."""
    listed = subprocess.run(
        ["nm", "-D", f"--{kind}-only", str(file)], capture_output=True, text=True, check=True
    ).stdout
    return set(re.findall(r" (_Z\w*3xrt\w*)$", listed, re.MULTILINE))


def test_the_real_library_has_what_the_plugin_asks_for():
    xrt.require()
    real = xrt_headers.library()
    if real is None:
        pytest.skip("the plugin was built with headers of this machine's XRT, not with those that were fetched")
    wanted = symbols(xrt.PLUGIN, "undefined")
    assert len(wanted) > 30
    assert wanted - symbols(real, "defined") == set()
    assert wanted - symbols(xrt.DOUBLE, "defined") == set()
