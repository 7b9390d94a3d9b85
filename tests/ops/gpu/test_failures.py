# SPDX-License-Identifier: Apache-2.0
"""Calls of OpenCL that fail, a device that is lost, kernels that never end: injected in the double of the loader."""

import re

import numpy as np
import pytest

from flownpu import ops
from flownpu.ops import q4nx
from tests.loader_double import Way
from tests.npu.decoders import Session, partition, read_nodes
from tests.ops.device import _argument, testing
from tests.ops.gpu.test_session import hidden_of

pytestmark = [pytest.mark.opencl, pytest.mark.usefixtures("pocl")]

gpu, DeviceFailed = testing.gpu, testing.npu.DeviceFailed
LAUNCH, BUFFER, BUILD = "clEnqueueNDRangeKernel", "clCreateBuffer", "clBuildProgram"
MARK = "clEnqueueMarkerWithWaitList"
RESOURCES, QUEUE, MEMORY, FAILURE = -5, -36, -4, -11
TOKENS = 8
# The seconds that tests of a hang wait: more than their kernels take on a busy machine.
SHORT = "3"


@pytest.fixture
def limit():
    """Seconds after which a device is given up."""
    return "600"


@pytest.fixture
def given(models, double, limit, monkeypatch):
    """A session that computed TOKENS tokens, the presents of these, and hidden states of some more."""
    del double
    hidden = hidden_of(models, "llama", np.arange(3, 63))
    # PoCL compiles a kernel for its work-group when it first runs, which may take longer than the short limit.
    for seconds in ("600", limit) if limit == SHORT else (limit,):
        monkeypatch.setenv("FLOWNPU_GPU_TIMEOUT", seconds)
        session = Session(gpu.SessionDevice(), *read_nodes(models.converted("llama", kv_dtype="fp32")))
        _, past = session.run(hidden[:TOKENS], TOKENS, session.past(0, np.float32), share=False)
    return session, hidden, past


def restored(session, past):
    kept = [part.copy() for part in past]
    session.device.restore([_argument(part) for part in kept])
    return kept


# --- In a run: a token's 17 kernels, of 3 layers, or a prompt's -------------------------------------------------------


# A token and a prompt by turns: a run's positions are added to whichever error its calls throw.
@pytest.mark.parametrize(
    ("count", "call", "nth", "way", "code", "message"),
    [
        (1, LAUNCH, 1, Way.ONCE, RESOURCES, r"kernel \w+: clEnqueueNDRangeKernel ended with CL_OUT_OF_RESOURCES"),
        (9, LAUNCH, 12, Way.ONCE, MEMORY, r"kernel \w+: clEnqueueNDRangeKernel .* CL_MEM_OBJECT_ALLOCATION_FAILURE"),
        (1, LAUNCH, 17, Way.LATE, RESOURCES, r"commands up to \w+: its execution ended with CL_OUT_OF_RESOURCES"),
        (9, LAUNCH, 17, Way.LATE, RESOURCES, r"commands up to \w+: its execution ended with CL_OUT_OF_RESOURCES"),
        (1, "clEnqueueReadBuffer", 1, Way.ONCE, RESOURCES, r"\d+ bytes to the host: clEnqueueReadBuffer ended with"),
        (9, "clEnqueueWriteBuffer", 1, Way.ONCE, RESOURCES, r"\d+ bytes to the device: clEnqueueWriteBuffer ended"),
        (1, "clSetKernelArg", 40, Way.ONCE, -49, r"kernel \w+, argument \d: clSetKernelArg ended with CL_INV"),
        (9, "clFlush", 1, Way.ONCE, RESOURCES, r"clFlush ended with CL_OUT_OF_RESOURCES"),
    ],
)
def test_failed_call_is_named_and_run_can_be_repeated(count, call, nth, way, code, message, given, double):
    """The error has call, code and positions; the cache can be restored, and the same run may be tried again."""
    session, hidden, past = given
    before = restored(session, past)
    double.inject(call, nth, way, code)
    where = f"position {TOKENS}" if count == 1 else f"positions {TOKENS}-{TOKENS + count - 1}"
    with pytest.raises(DeviceFailed, match=rf"(?s)device 'gpu': .*{message}.*; .{{20,}} \({where}\)"):
        session.run(hidden[TOKENS : TOKENS + count], TOKENS + count, past, share=False)
    double.reset()
    for mine, its in zip(restored(session, past), before, strict=True):
        np.testing.assert_array_equal(mine, its)
    again, _ = session.run(hidden[TOKENS : TOKENS + count], TOKENS + count, past, share=False)
    fresh, _ = session.run(hidden[TOKENS : TOKENS + count], TOKENS + count, before, share=False)
    np.testing.assert_array_equal(again, fresh)


@pytest.mark.parametrize("nth", [1, 17])
def test_lost_device_loses_caches_and_says_so(nth, given, double):
    """The KV caches in its memory are lost with it, and the error says so."""
    session, hidden, past = given
    double.inject(LAUNCH, nth, Way.LOST, QUEUE)
    with pytest.raises(DeviceFailed, match=rf"CL_INVALID_COMMAND_QUEUE \(-36\).* \(position {TOKENS}\)"):
        session.run(hidden[TOKENS : TOKENS + 1], TOKENS + 1, past, share=False)
    with pytest.raises(
        RuntimeError, match=r"were in the device's memory, and are lost with it: begin the conversation"
    ):
        restored(session, past)


@pytest.mark.parametrize("limit", [SHORT])
@pytest.mark.parametrize(("nth", "count"), [(1, 1), (17, 1), (20, 9)])
def test_kernels_that_never_end_are_reported(nth, count, given, double):
    """The limit ends the run; after it nothing waits again, whatever is asked."""
    session, hidden, past = given
    double.inject(LAUNCH, nth, Way.HUNG)
    message = r"commands from \w+ to \w+ did not end within 3.0* s on .*; see `sudo dmesg`.* set FLOWNPU_GPU_TIMEOUT"
    with pytest.raises(DeviceFailed, match=message):
        session.run(hidden[TOKENS : TOKENS + count], TOKENS + count, past, share=False)
    marks = double.calls(MARK)
    with pytest.raises(DeviceFailed, match="was given up, since a kernel did not end"):
        session.run(hidden[TOKENS : TOKENS + 1], TOKENS + 1, past, share=False)
    with pytest.raises(RuntimeError, match=r"was given up.*lost with it"):
        restored(session, past)
    assert double.calls(MARK) == marks


def test_command_limit_restarts_after_each_mark(models, double, monkeypatch):
    """The limit starts again at each mark that is reached. There is one after 64 commands, and one at a wait of the
    host.
    """
    monkeypatch.setenv("FLOWNPU_GPU_TIMEOUT", "1000")
    session = Session(gpu.SessionDevice(), *read_nodes(models.converted("deep", kv_dtype="fp32")))
    hidden = hidden_of(models, "deep", np.arange(3, 3 + TOKENS))
    double.reset()
    session.run(hidden, TOKENS, session.past(0, np.float32), share=False)
    assert 64 < double.calls(LAUNCH) < 128
    assert double.calls(MARK) == 2  # one after 64, one at the end


@pytest.mark.parametrize("text", ["0", "-1", "soon", "1 s", ""])
def test_command_limit_with_wrong_value_is_refused(text, monkeypatch):
    monkeypatch.setenv("FLOWNPU_GPU_TIMEOUT", text)
    message = f"expected FLOWNPU_GPU_TIMEOUT to be a number of seconds above 0, got '{text}'"
    with pytest.raises(RuntimeError, match=message):
        gpu.open()


# --- When a session is made, and when a cache grows -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "nth", "code", "message"),
    [
        (BUFFER, 3, MEMORY, r"a buffer of \d+ bytes \(.* of \d+ bytes \d+ are in use\): clCreateBuffer ended with"),
        (BUILD, 2, FAILURE, r"kernel \w+ on .*clBuildProgram ended with CL_BUILD_PROGRAM_FAILURE \(-11\).*selftest"),
        ("clCreateKernel", 4, -46, r"kernel \w+: clCreateKernel ended with CL_INVALID_KERNEL_NAME"),
        ("clCreateContext", 1, -2, r"opening .*: clCreateContext ended with CL_DEVICE_NOT_AVAILABLE.*flownpu doctor"),
        ("clCreateCommandQueue", 1, RESOURCES, r"opening .*: clCreateCommandQueue ended with CL_OUT_OF_RESOURCES"),
    ],
)
def test_session_that_cannot_be_made_says_why(call, nth, code, message, models, double, monkeypatch):
    monkeypatch.setenv("FLOWNPU_GPU_CACHE", "")  # so that kernels are compiled
    device = gpu.SessionDevice()
    nodes, outputs = read_nodes(models.converted("llama", kv_dtype="fp32"))
    given = partition(nodes)
    double.inject(call, nth, Way.ONCE, code)
    lowered = device.lower(given, outputs=outputs)
    if lowered.on_host:  # The device could not be opened, so lowering gives the reason.
        assert re.search(message, lowered.on_host[0][2])
        return
    node = next(node for node in lowered.nodes if node.op_type == "DecoderLayers")
    with pytest.raises(DeviceFailed, match=rf"(?s){message}"):
        device.prepare(node)


def test_refused_binary_is_compiled_anew(pocl, double, tmp_path):
    del pocl
    kernel = gpu.Kernel("args.y.Write(1.0f, 0);", [gpu.Tensor("y", "float", [1], written=True)])
    for compiled, calls in ((1, 1), (1, 2)):
        double.inject(BUILD, 1, Way.ONCE if calls == 2 else Way.LATE, FAILURE)
        if calls == 1:
            double.reset()
        context, y = gpu.open(cache=str(tmp_path)), np.zeros(1, np.float32)
        context.run(kernel, [1, 1, 1], [y])
        assert (context.compiled, context.from_cache, y[0]) == (compiled, 0, 1)


def test_cache_beyond_driver_memory_says_positions_with_room(given, double):
    """The error names the number of positions with room. Nothing is changed, and a shorter run succeeds."""
    session, hidden, past = given
    parts = 2 * session.attributes["layers"]
    double.inject(BUFFER, parts // 2 + 1, Way.ONCE, MEMORY)
    count = 35  # makes the cache grow
    size = 4 * session.attributes["attention.kv_heads"] * session.attributes["attention.head_size"] * parts
    message = (
        rf"a KV cache of {TOKENS + count} positions of {size} bytes, of which there was room for "
        rf"{(TOKENS + count) // 2} positions: shorten the context"
    )
    with pytest.raises(testing.npu.Unsupported, match=message):
        session.run(hidden[TOKENS : TOKENS + count], TOKENS + count, past, share=False)
    found, _ = session.run(hidden[TOKENS : TOKENS + 1], TOKENS + 1, past, share=False)
    fresh, _ = session.run(hidden[TOKENS : TOKENS + 1], TOKENS + 1, restored(session, past), share=False)
    np.testing.assert_array_equal(found, fresh)


# --- Operators by themselves ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("way", "code", "message"),
    [
        (Way.ONCE, RESOURCES, "kernel fused_dqp: clEnqueueNDRangeKernel ended with CL_OUT_OF_RESOURCES"),
        (Way.LATE, RESOURCES, "its execution ended with CL_OUT_OF_RESOURCES"),
        (Way.LOST, QUEUE, "CL_INVALID_COMMAND_QUEUE"),
        (Way.HUNG, 0, "fused_dqp did not end within 3"),
    ],
)
def test_operator_after_failed_one_runs(way, code, message, double, rng, monkeypatch):
    """It gets a new OpenCL context."""
    x = rng.standard_normal((1, 64), dtype=np.float32)
    blocks = q4nx.pack(*q4nx.quantize(rng.standard_normal((32, 64), dtype=np.float32)), q4nx.NARROW)
    if way is Way.HUNG:
        ops.fused_dqp(x, blocks, rows=32, device="gpu")  # is compiled with no limit
        monkeypatch.setenv("FLOWNPU_GPU_TIMEOUT", SHORT)
    # An option that no other test has: a device of this test's own.
    options = {"opencl_device": "Portable Computing Language)"[: 10 + way]}
    well = ops.fused_dqp(x, blocks, rows=32, device="gpu", options=options)
    double.inject(LAUNCH, 1, way, code)
    with pytest.raises((RuntimeError, ValueError), match=message):
        ops.fused_dqp(x, blocks, rows=32, device="gpu", options=options)
    double.reset()
    np.testing.assert_array_equal(ops.fused_dqp(x, blocks, rows=32, device="gpu", options=options), well)
