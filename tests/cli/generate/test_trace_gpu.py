# SPDX-License-Identifier: Apache-2.0
"""`flownpu trace --device gpu`: every kernel of a token, timed by the device, on the clock of all other events."""

import itertools
import json

import pytest

pytestmark = [pytest.mark.opencl, pytest.mark.usefixtures("pocl")]

TOKENS = 4
LAYERS = 6


@pytest.fixture(scope="module")
def runs():
    return []


@pytest.fixture
def traced(flownpu, model, tmp_path, runs):
    """The command's report and the trace's events, of a run that all tests share."""
    if not runs:
        path = tmp_path / "trace.json"
        arguments = ("-p", "The with statement is used to", "--max-new-tokens", TOKENS, "--device", "gpu")
        done = flownpu("trace", model, *arguments, "-o", path, "--json")
        assert done.code == 0, done.err
        runs.append((json.loads(done.out), json.loads(path.read_text())["traceEvents"]))
    return runs[0]


def kernels_of(events):
    kernels = [event for event in events if event.get("args", {}).get("array") == "gpu"]
    return sorted(kernels, key=lambda event: event["ts"])


def test_gpu_token_has_expected_launches_and_transfers(traced):
    report, events = traced
    each = report["per_token"]
    # A hidden state of 256 numbers in, logits of 4096 out.
    assert each == {
        "dispatches": 5 * LAYERS + 2, "bytes_to_device": 4 * 256, "bytes_to_host": 4 * 4096, "word_bytes": 0,
    }  # fmt: skip
    found = {row["operator"]: row["count"] for row in report["operators"] if row["place"] == "gpu kernel"}
    tokens = TOKENS - 1  # the first is the prompt's
    assert found == {
        "rms_norm": tokens,
        "fused_dqp": tokens * (4 * LAYERS + 1),
        "flow_attention": tokens * LAYERS,
    }
    assert any("quantize_rows, positions 0-" in event["name"] for event in kernels_of(events))


def test_kernels_lie_inside_their_step(traced):
    """Kernels follow one another; the clocks of device and host differ by less than a launch takes."""
    _, events = traced
    slack = 500  # microseconds
    kernels = kernels_of(events)
    for before, after in itertools.pairwise(kernels):
        assert before["ts"] + before["dur"] <= after["ts"] + 2
    steps = [event for event in events if event.get("args", {}).get("op_name") == "DecoderLayers"]
    steps = [event for event in steps if "device" in event["args"]]
    assert len(steps) == TOKENS
    for kernel in kernels:
        end = kernel["ts"] + kernel["dur"]
        assert any(step["ts"] - slack <= kernel["ts"] and end <= step["ts"] + step["dur"] + slack for step in steps)
