# SPDX-License-Identifier: Apache-2.0
"""A folder as `flownpu build` writes it, read and run by the host's C++: attention over a cache that grows."""

import numpy as np
import pytest

from flownpu.aie.artifacts.emulated import write_emulated
from flownpu.aie.designs.flow_kv import FlowKV
from flownpu.aie.plan.limits import LIMITS
from flownpu.aie.programs.alone import program_of
from flownpu.aie.programs.call import moving_call
from flownpu.aie.programs.call_family import CallSweep
from tests.aie.emulation import call, emulator
from tests.aie.host_kernels import BFLOAT16, bf16
from tests.npu.arrays import npu, whole

HEADS, KV_HEADS, D, KEYS = 4, 2, 16, 8
MOST = LIMITS["npu2"].iteration_maximum  # chunks of a task
CONTEXT = (MOST + 1) * KEYS
LAST_OF_A_TASK = MOST * KEYS - 1
NODE = npu.Partition([("node", "DecoderLayers", "", {}, [], [])]).nodes[0]


def attention(window):
    design = FlowKV("npu2", HEADS, KV_HEADS, D, KEYS)

    def program(position):
        return design.program(position + 1, CONTEXT, window=window or None)

    sweeps = [CallSweep(0, 1, 1, window)]
    return moving_call("flow_kv", "flow_kv", f"window{window}", program, "npu2", CONTEXT, KEYS, sweeps)


@pytest.fixture(scope="module")
def calls():
    return {window: attention(window) for window in (0, 100)}


@pytest.fixture(scope="module")
def artifacts(calls, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "artifacts" / "emulate"
    write_emulated(folder, "npu2", [program_of(calls.values(), CONTEXT)], about={})
    return npu.Artifacts(str(folder))


def test_index_names_written_calls(artifacts):
    assert artifacts.target == "npu2"
    assert len(bytes.fromhex(artifacts.identity)) == 32
    (program,) = artifacts.programs("decode", NODE)
    assert program.dispatches == [[(0, "flow_kv, alone"), (1, "flow_kv, alone")]]
    record = artifacts.call(1)
    line = 2 * HEADS * D
    assert record.buffers == [("q", line), ("kv", 2 * CONTEXT * KV_HEADS * 2 * D), ("o", line)]
    assert artifacts.family(record).name == "window100"


@pytest.mark.parametrize("window", [0, 100])
def test_positions_share_one_array(window, calls, artifacts, rng):
    """Tokens one after the other, as in decode: only position-dependent words are written again."""
    record = artifacts.call(list(calls).index(window))
    family = artifacts.family(record)
    runtime = npu.open_emulated_runtime("npu2")
    array = runtime.load(artifacts.array_file(record))
    q, kv = bf16(rng.normal(size=HEADS * D)), bf16(rng.normal(size=CONTEXT * KV_HEADS * 2 * D))
    buffers = [runtime.allocate(size) for _, size in record.buffers]
    for buffer, content in zip(buffers, (q, kv), strict=False):
        buffer.bytes()[:] = content.view(np.uint8)
        buffer.to_device(0, content.nbytes)

    sequences = {}
    expected = emulator(calls[window].plan(0).array)
    for position in (0, 1, KEYS - 1, KEYS, 99, 100, LAST_OF_A_TASK, LAST_OF_A_TASK + 1, CONTEXT - 1):
        number = family.class_of(position)
        if number not in sequences:
            sequences[number] = array.sequence(np.array(family.words(position)))
        for word, value in family.patch(position):
            sequences[number].write(word, value)
        runtime.run(array, [("flow_kv", sequences[number], whole(*buffers))], 1000)
        buffers[2].to_host(0, buffers[2].bytes().size)
        found = call(expected, calls[window].plan(position), q=q, kv=kv)["o"]
        assert found.tobytes() == buffers[2].bytes().tobytes()
        assert np.isfinite(buffers[2].bytes().view(BFLOAT16).astype(float)).all()
    assert len(sequences) == (1 if window else 2)
