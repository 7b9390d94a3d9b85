# SPDX-License-Identifier: Apache-2.0
"""One conversation on two devices by turns, prompts on one and tokens on the other: its text, and what is copied."""

import gc
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import psutil
import pytest

from flownpu.npu.artifacts import build_artifacts
from tests.decoding import STORED, DecoderSession
from tests.end_to_end import replies
from tests.end_to_end.conftest import Tokens
from tests.npu.rounding import array_error
from tests.opencl_double import Double, Way

CAPACITY = 256
THRESHOLD = 8
# Each device rounds, an array the most: a logit of each is off by array_error (rms), the difference of two devices' by
# sqrt(2) times that. Of 8 runs of a vocabulary of some thousand logits the largest is within 6 sigma.
SIGMAS = 6
PAIRS = (
    "emulate+cpu",
    pytest.param("gpu+cpu", marks=pytest.mark.opencl),
    pytest.param("cpu+gpu", marks=pytest.mark.opencl),
    pytest.param("emulate+gpu", marks=pytest.mark.opencl),
)
TO_TENSORS, TO_DEVICE = "the device to the caller's tensors", "the caller's tensors to the device"
BETWEEN = "a device's memory to another's"


class SharedSession(DecoderSession):
    """A decoder whose past and present are the same tensors, as GenAI's are."""

    def __call__(self, ids: np.ndarray, past: int) -> np.ndarray:  # type: ignore[override]
        """Logits of the last of the tokens [S], of which the first is at position `past`."""
        if not self.cache:
            for value in self.cache_inputs:
                storage, kind = STORED[value.type]
                empty = np.zeros((1, value.shape[1], CAPACITY, value.shape[3]), storage)
                self.cache.append(onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(empty, kind))
        binding = self.session.io_binding()
        binding.bind_cpu_input("input_ids", np.array([ids], np.int64))
        binding.bind_cpu_input("attention_mask", np.ones((1, past + len(ids)), np.int64))
        logits, *presents = self.session.get_outputs()
        binding.bind_output(logits.name)
        for value, present, cache in zip(self.cache_inputs, presents, self.cache, strict=True):
            binding.bind_ortvalue_input(value.name, cache)
            binding.bind_ortvalue_output(present.name, cache)
        self.session.run_with_iobinding(binding)
        return binding.get_outputs()[0].numpy()[0, -1]


@pytest.fixture(scope="module")
def artifacts(converted: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("artifacts") / "emulate"
    build_artifacts(converted(), context=CAPACITY, output=folder)
    return folder


@pytest.fixture
def options(request: pytest.FixtureRequest, artifacts: Path) -> Callable[[str], dict[str, str]]:
    """Options of the provider for a device or a pair of devices."""

    def of(device: str) -> dict[str, str]:
        if "gpu" in device:
            request.getfixturevalue("pocl")
        found = {"device": device, "activations": "bf16", "artifacts": str(artifacts)}
        return found | ({"prompt_threshold": str(THRESHOLD)} if "+" in device else {})

    return of


@pytest.fixture
def open_session(
    converted: Callable[..., Path], ep_devices: Any, options: Callable[[str], dict[str, str]]
) -> Callable[..., SharedSession]:
    def make(device: str, profile: Path | None = None, **more: str) -> SharedSession:
        return SharedSession(converted(), ep_devices[:1], options(device) | more, profile)

    return make


def events_of(session: SharedSession) -> list[dict[str, Any]]:
    """Ends profiling; the provider's events in their order."""
    events = json.loads(Path(session.session.end_profiling()).read_text())
    found = [event for event in events if event.get("args", {}).get("provider") == "FlowNPUExecutionProvider"]
    return sorted(found, key=lambda event: event["ts"])


def bytes_of(session: SharedSession, positions: int) -> int:
    """Bytes of keys and values of some positions in the graph's tensors."""
    return sum(positions * v.shape[1] * v.shape[3] * np.dtype(STORED[v.type][0]).itemsize for v in session.cache_inputs)


# The runs of a conversation: first position, number of tokens; the last prompt goes on after a rewind to position 30.
RUNS = ((0, 70), (70, 1), (71, 1), (72, 20), (92, 1), (30, 10), (40, 1), (41, 1))
# What each run finds elsewhere: positions first .. end - 1.
HANDED = {
    "emulate+cpu": [None, (TO_TENSORS, 0, 70), None, (TO_DEVICE, 70, 72), (TO_TENSORS, 72, 92), None,
                    (TO_TENSORS, 30, 40), None],
}  # fmt: skip
HANDED["gpu+cpu"] = HANDED["emulate+cpu"]
HANDED["cpu+gpu"] = [None, (TO_DEVICE, 0, 70), None, (TO_TENSORS, 70, 72), (TO_DEVICE, 72, 92), None,
                     (TO_DEVICE, 30, 40), None]  # fmt: skip
HANDED["emulate+gpu"] = [None, (BETWEEN, 0, 70), None, (BETWEEN, 70, 72), (BETWEEN, 72, 92), None,
                         (BETWEEN, 30, 40), None]  # fmt: skip


@pytest.mark.parametrize("pair", PAIRS)
def test_switch_copies_only_rows_that_device_lacks(
    pair: str, open_session: Callable[..., SharedSession], held_out: Tokens, reference: Any, tmp_path: Path
) -> None:
    """Each run has the logits of one device, and is on its own: the CPU's are those with events of attention."""
    session, other = open_session(pair, tmp_path / "profile"), open_session("cpu")
    text: Tokens = []
    for number, (first, count) in enumerate(RUNS):
        text = [*text[:first], *held_out[100 * (first == 30) + first :][:count]]
        ours, theirs = (one(text[first:], first) for one in (session, other))
        error = array_error(reference, np.array(text), [len(text) - 1], prompt=True)
        assert np.abs(ours - theirs).max() < SIGMAS * math.sqrt(2) * error, f"run {number}"
    events = events_of(session)
    found = [
        (event["name"], *map(int, event["args"]["positions"].split("-")), *(
            int(event["args"][key]) for key in ("bytes_to_device", "bytes_to_host")))
        for event in events if event["args"]["op_name"] == "hand-over"
    ]  # fmt: skip
    expected = []
    for what, first, end in filter(None, HANDED[pair]):
        size = bytes_of(session, end - first)
        expected.append((what, first, end - 1, size * (what != TO_TENSORS), size * (what != TO_DEVICE)))
    assert found == expected
    prompts, tokens = (sum((count >= THRESHOLD) == is_prompt for _, count in RUNS) for is_prompt in (True, False))
    names = [event["args"]["op_name"] for event in events]
    layers = len(session.cache_inputs) // 2
    on_cpu = {"emulate+cpu": tokens, "gpu+cpu": tokens, "cpu+gpu": prompts, "emulate+gpu": 0}[pair]
    assert names.count("FlowQKVAttention") == on_cpu * layers
    assert names.count("DecoderLayers") == len(RUNS) - on_cpu
