# SPDX-License-Identifier: Apache-2.0
"""One conversation on two devices by turns, prompts on one and tokens on the other: its text, and what is copied."""

import gc
import json
import math
import re
import threading
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
from tests.end_to_end.replies import generator_of, reply
from tests.loader_double import Double, Way
from tests.npu.rounding import array_error

CAPACITY = 256
THRESHOLD = 8
# Each device rounds, an array the most: a logit of each is off by array_error (rms), the difference of two devices' by
# sqrt(2) times that. Of 8 runs of a vocabulary of some thousand logits the largest is within 6 sigma.
SIGMAS = 6
SWITCHES = 120
WINDOW, GLOBAL_LAYER = 64, 5  # of the model, in its other five layers
# The runs of a conversation: first position, number of tokens; the last prompt goes on after a rewind to position 30.
RUNS = ((0, 70), (70, 1), (71, 1), (72, 20), (92, 1), (30, 10), (40, 1), (41, 1))
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

    def __call__(  # type: ignore[override]
        self, ids: np.ndarray, past: int, options: onnxruntime.RunOptions | None = None
    ) -> np.ndarray:
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
        self.session.run_with_iobinding(binding, options)
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
        found = {"device": device.replace("vulkan", "gpu"), "activations": "bf16", "artifacts": str(artifacts)}
        if "vulkan" in device:
            request.getfixturevalue("lavapipe")
            found["gpu_api"] = "vulkan"
        elif "gpu" in device:
            request.getfixturevalue("pocl")
        return found | ({"prompt_threshold": str(THRESHOLD)} if "+" in device else {})

    return of


@pytest.fixture
def open_session(
    converted: Callable[..., Path], ep_devices: Any, options: Callable[[str], dict[str, str]]
) -> Callable[..., SharedSession]:
    def make(of: str, profile: Path | None = None, **more: str) -> SharedSession:
        return SharedSession(converted(), ep_devices[:1], options(of) | more, profile)

    return make


@pytest.fixture(scope="module")
def on_cpu(
    converted: Callable[..., Path], ep_devices: Any, held_out: Tokens, reference: Any
) -> list[tuple[Tokens, np.ndarray, float]]:
    """For each of RUNS the text so far, the CPU's logits, and how far another device's may be from them."""
    session = SharedSession(converted(), ep_devices[:1], {"device": "cpu", "activations": "bf16"})
    text: Tokens = []
    found = []
    for first, count in RUNS:
        text = [*text[:first], *held_out[100 * (first < len(text)) + first :][:count]]
        error = array_error(reference, np.array(text), [len(text) - 1], prompt=True)
        found.append((text, session(text[first:], first), SIGMAS * math.sqrt(2) * error))
    return found


def events_of(session: SharedSession) -> list[dict[str, Any]]:
    """Ends profiling; the provider's events in their order."""
    events = json.loads(Path(session.session.end_profiling()).read_text())
    found = [event for event in events if event.get("args", {}).get("provider") == "FlowNPUExecutionProvider"]
    return sorted(found, key=lambda event: event["ts"])


def bytes_of(session: SharedSession, positions: int, of_windows: int) -> int:
    """Bytes of keys and values of some positions in the graph's tensors; in layers with a window of `of_windows`."""
    return sum(
        (positions if f".{GLOBAL_LAYER}." in v.name else of_windows)
        * v.shape[1] * v.shape[3] * np.dtype(STORED[v.type][0]).itemsize
        for v in session.cache_inputs
    )  # fmt: skip


# The positions first .. end - 1 that each run finds elsewhere.
HANDED = {
    "emulate+cpu": [None, (TO_TENSORS, 0, 70), None, (TO_DEVICE, 70, 72), (TO_TENSORS, 72, 92), None,
                    (TO_TENSORS, 30, 40), None],
}  # fmt: skip
HANDED["gpu+cpu"] = HANDED["emulate+cpu"]
HANDED["cpu+gpu"] = [None, (TO_DEVICE, 0, 70), None, (TO_TENSORS, 70, 72), (TO_DEVICE, 72, 92), None,
                     (TO_DEVICE, 30, 40), None]  # fmt: skip
# The GPU takes over what the window shows of the prompt, and the rest after the rewind.
HANDED["emulate+gpu"] = [None, (BETWEEN, 0, 70), None, (BETWEEN, 70, 72), (BETWEEN, 72, 92), None,
                         (BETWEEN, 0, 40), None]  # fmt: skip
BETWEEN_BYTES = {(0, 70): (70, WINDOW - 1), (0, 40): (10, 10 + 70 - (WINDOW - 1))}


@pytest.mark.parametrize("pair", PAIRS)
def test_switch_copies_only_rows_that_device_lacks(
    pair: str, open_session: Callable[..., SharedSession], on_cpu: list[tuple[Tokens, np.ndarray, float]],
    tmp_path: Path,
) -> None:  # fmt: skip
    """Each run has the logits of one device, and is on its own: the CPU's are those with events of attention."""
    session = open_session(pair, tmp_path / "profile")
    for (first, _), (text, logits, bound) in zip(RUNS, on_cpu, strict=True):
        assert np.abs(session(text[first:], first) - logits).max() < bound, f"run from {first} on"
    events = events_of(session)
    found = [
        (event["name"], *map(int, event["args"]["positions"].split("-")), *(
            int(event["args"][key]) for key in ("bytes_to_device", "bytes_to_host")))
        for event in events if event["args"]["op_name"] == "hand-over"
    ]  # fmt: skip
    expected = []
    for what, first, end in filter(None, HANDED[pair]):
        count = end - first
        counts = BETWEEN_BYTES.get((first, end), (count, count)) if what == BETWEEN else (count, count)
        size = bytes_of(session, *counts)
        expected.append((what, first, end - 1, size * (what != TO_TENSORS), size * (what != TO_DEVICE)))
    assert found == expected
    prompts, tokens = (sum((count >= THRESHOLD) == is_prompt for _, count in RUNS) for is_prompt in (True, False))
    names = [event["args"]["op_name"] for event in events]
    layers = len(session.cache_inputs) // 2
    runs_of_cpu = {"emulate+cpu": tokens, "gpu+cpu": tokens, "cpu+gpu": prompts, "emulate+gpu": 0}[pair]
    assert names.count("FlowQKVAttention") == runs_of_cpu * layers
    assert names.count("DecoderLayers") == len(RUNS) - runs_of_cpu
    if pair == "emulate+gpu":
        arrays = [event["args"]["array"] for event in events if event["args"]["op_name"] == "dispatch"]
        switches = [array == "gpu" for array, before in zip(arrays[1:], arrays, strict=False)
                    if (array == "gpu") != (before == "gpu")]  # fmt: skip
        assert switches == [True, False, True, False, True]


def test_report_has_price_of_second_copy(
    converted: Callable[..., Path], open_session: Callable[..., SharedSession], tmp_path: Path
) -> None:
    """All constants' bytes, which the file keeps beside the graph."""
    report = tmp_path / "placement.json"
    open_session("emulate+cpu", placement=str(report))
    placement = json.loads(report.read_text())
    assert placement["why"] == "device=emulate+cpu"
    assert f"for {THRESHOLD} and more new tokens, and cpu (" in placement["device"]
    found = re.search(
        r"weights of (\d+) bytes in the file's pages and once more in a device's memory", placement["summary"]
    )
    assert found
    size = (converted() / "model.onnx.data").stat().st_size
    assert size / 2 < int(found[1]) <= size


# Seconds of a device that is fast at prompts, of one that is fast at tokens, and of a bad one.
READER, WRITER, BAD = "4=2 8=2 70=3 token=0.5", "4=1 8=4 70=9 token=0.1", "4=9 8=9 70=99 token=9"


@pytest.mark.parametrize(
    ("prices", "device"),
    [
        ({"emulate": READER, "cpu": WRITER}, "emulate+cpu"),
        ({"emulate": BAD, "cpu": WRITER}, "cpu"),
        ({"emulate": READER, "cpu": BAD}, "emulate"),
        ({"npu": READER, "cpu": WRITER}, "cpu"),
        pytest.param({"gpu": READER, "cpu": WRITER}, "gpu+cpu", marks=pytest.mark.opencl),
        pytest.param({"cpu": READER, "gpu": WRITER, "npu": READER}, "cpu+gpu", marks=pytest.mark.opencl),
        pytest.param({"emulate": READER, "gpu": WRITER, "cpu": BAD}, "emulate+gpu", marks=pytest.mark.opencl),
        pytest.param({"gpu": WRITER, "cpu": BAD}, "gpu", marks=pytest.mark.opencl),
    ],
)
def test_auto_computes_where_prices_are_least(
    prices: dict[str, str], device: str, open_session: Callable[..., SharedSession],
    on_cpu: list[tuple[Tokens, np.ndarray, float]], tmp_path: Path,
) -> None:  # fmt: skip
    """By what runs, too: the CPU's runs are those with events of attention."""
    report = tmp_path / "placement.json"
    table = " | ".join(
        ["measured seconds prompt=70 answer=20", *map(" ".join, prices.items()), "switch 4=0 8=0.1 70=1"]
    )
    more = {"device": "auto", "prices": table, "prompt_threshold": "200", "placement": str(report)}
    session = open_session(device, tmp_path / "profile", **more)
    for (first, _), (text, logits, bound) in zip(RUNS[:2], on_cpu, strict=False):
        assert np.abs(session(text[first:], first) - logits).max() < bound
    placement = json.loads(report.read_text())
    why = placement["why"]
    assert (" for 8 and more new tokens, and " in placement["device"]) == ("+" in device)
    prompts, _, tokens = device.rpartition("+")
    prompts = prompts or tokens
    length = " of 8 and more new tokens" if "+" in device else ""
    rate = {READER: "2", WRITER: "10", BAD: "0.111"}[prices[tokens]]
    assert why.startswith(f"device=auto by measured seconds: tokens: {tokens} {rate} tokens/s")
    assert f"; prompts{length}, one of 70: {prompts} {prices[prompts].split('70=')[1].split()[0]} s" in why
    assert ("; without npu: the session was given none" in why or "; without npu: this build drives none" in why) == (
        "npu" in prices
    )
    names = [event["args"]["op_name"] for event in events_of(session)]
    runs_of_cpu = (prompts == "cpu") + (tokens == "cpu")
    assert names.count("FlowQKVAttention") == runs_of_cpu * len(session.cache_inputs) // 2
    assert names.count("DecoderLayers") == 2 - runs_of_cpu


@pytest.mark.parametrize(("prefer", "device"), [("speed", "emulate"), ("energy", "cpu")])
def test_auto_prefers_seconds_or_joules(
    prefer: str, device: str, open_session: Callable[..., SharedSession], tmp_path: Path
) -> None:
    report = tmp_path / "placement.json"
    table = "predicted seconds prompt=4 answer=9 | emulate 4=1 token=1 | cpu 4=2 token=2"
    joules = "predicted joules prompt=4 answer=9 | emulate 4=8 token=1 | cpu 4=2 token=0.5"
    open_session("cpu", device="auto", prefer=prefer, prices=f"{table}; {joules}", placement=str(report))
    found = json.loads(report.read_text())
    assert found["device"].startswith(f"{device} (")
    assert (
        found["why"]
        == {
            "speed": "device=auto by predicted seconds: tokens: emulate 1 tokens/s (cpu 0.5); "
            "prompts, one of 4: emulate 1 s (cpu 2)",
            "energy": "device=auto by predicted joules: tokens: cpu 0.5 J (emulate 1); "
            "prompts, one of 4: cpu 2 J (emulate 8)",
        }[prefer]
    )


@pytest.mark.opencl
def test_auto_without_gpu_says_so(open_session: Callable[..., SharedSession], tmp_path: Path) -> None:
    """Another GPU than the one that is there, which is that of the list."""
    report = tmp_path / "placement.json"
    for prices, why in (
        (f"gpu {WRITER} | cpu {READER}", "device=auto by measured seconds: tokens: cpu 2 tokens/s; prompts, "),
        (f"gpu {WRITER}", "device=auto and "),
    ):
        table = f"measured seconds prompt=70 answer=20 | {prices}"
        open_session("gpu", device="auto", prices=table, opencl_device="no such", placement=str(report))
        found = json.loads(report.read_text())
        assert found["device"].startswith("cpu (")
        assert found["why"].startswith(why)
        assert re.search("; without gpu: .*no such", found["why"])


def test_compilation_for_two_devices_is_refused(
    converted: Callable[..., Path], ep_devices: Any, options: Callable[[str], dict[str, str]], tmp_path: Path
) -> None:
    session_options = onnxruntime.SessionOptions()
    session_options.add_session_config_entry("ep.context_enable", "1")
    session_options.add_session_config_entry("ep.context_file_path", str(tmp_path / "compiled.onnx"))
    session_options.add_provider_for_devices(ep_devices[:1], options("emulate+cpu"))
    with pytest.raises(Exception, match=r"device emulate\+cpu takes models that are not compiled .* or use one device"):
        onnxruntime.InferenceSession(converted() / "model.onnx", session_options)


# --- GenAI ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "pair",
    [
        *PAIRS,
        *(pytest.param(pair, marks=pytest.mark.opencl) for pair in ("vulkan+cpu", "cpu+vulkan", "emulate+vulkan")),
    ],
)
def test_turns_and_rewind_equal_one_device(
    pair: str, open_model: Callable[..., Any], options: Callable[[str], dict[str, str]], held_out: Tokens,
    reference: Any,
) -> None:  # fmt: skip
    """Three turns, the third after a rewind into the first: the CPU's tokens, up to one chosen between close logits."""
    found = []
    for device in (pair, "cpu"):
        generator = generator_of(open_model(provider_options=options(device)), CAPACITY)
        turns = [reply(generator, held_out[:70], 4), reply(generator, held_out[300:320], 4)]
        generator.rewind_to(40)
        found.append([*turns, reply(generator, held_out[330:345], 4)])
    before: Tokens = []
    for ours, theirs, prompt in zip(*found, (held_out[:70], held_out[300:320], held_out[330:345]), strict=True):
        text = [*before, *prompt]
        # The gap of two logits has twice the error of one (two devices, two logits); as above, of fewer numbers.
        bound = SIGMAS * 2 * array_error(reference, np.array(text), [len(text) - 1], prompt=True)
        if not replies.assert_same(ours, theirs, lambda _, bound=bound: bound):
            break
        before = [*text, *theirs.tokens] if prompt is not held_out[300:320] else before


@pytest.mark.opencl
@pytest.mark.parametrize("pair", ["gpu+cpu", "cpu+gpu"])
def test_batch_equals_cpu(
    pair: str, open_model: Callable[..., Any], options: Callable[[str], dict[str, str]], held_out: Tokens
) -> None:
    sequences = [held_out[start : start + length] for start, length in ((0, 18), (50, 9), (150, 13))]
    ours, theirs = (
        replies.batch(open_model(provider_options=options(device), kv_dtype="fp32"), sequences, 6)
        for device in (pair, "cpu")
    )
    assert ours == theirs


# --- Failures ---------------------------------------------------------------------------------------------------------

LAUNCH = "clEnqueueNDRangeKernel"


@pytest.mark.opencl
@pytest.mark.parametrize(
    ("pair", "failing", "way"),
    [("gpu+cpu", 3, Way.ONCE), ("gpu+cpu", 3, Way.LOST), ("cpu+gpu", 1, Way.ONCE), ("cpu+gpu", 1, Way.LOST)],
)
def test_cpu_goes_on_after_device_failed(
    pair: str, failing: int, way: Way, open_session: Callable[..., SharedSession], double: Double,
    on_cpu: list[tuple[Tokens, np.ndarray, float]],
) -> None:  # fmt: skip
    """A run of the GPU fails after one of the CPU, which has all keys and values of the tokens before it."""
    session = open_session(pair)
    for number, ((first, count), (text, logits, bound)) in enumerate(zip(RUNS, on_cpu, strict=True)):
        if number == failing:
            double.inject(LAUNCH, 20, way, -36)
            positions = f"positions {first}-{first + count - 1}" if count > 1 else f"position {first}"
            with pytest.raises(Exception, match=rf"{positions}\)\. The session's next runs are on its CPU"):
                session(text[first:], first)
        assert np.abs(session(text[first:], first) - logits).max() < bound, f"run from {first} on"


@pytest.mark.opencl
def test_array_goes_on_after_gpu_failed(
    open_session: Callable[..., SharedSession], double: Double, on_cpu: list[tuple[Tokens, np.ndarray, float]]
) -> None:
    """The first token's run fails on the GPU, which had taken the prompt's keys and values over."""
    session = open_session("emulate+gpu")
    session(on_cpu[0][0], 0)
    double.inject(LAUNCH, 20, Way.LOST, -36)
    for number in (1, 2, 3):
        text, logits, bound = on_cpu[number]
        first = RUNS[number][0]
        if number == 1:
            with pytest.raises(Exception, match=r"\(position 70\)\. The session's next runs are on device emulate"):
                session(text[first:], first)
        assert np.abs(session(text[first:], first) - logits).max() < bound, f"run from {first} on"


# The GPU asks every 64 kernels, more than this model has, and the CPU every 20 ms, in which it reads the prompt.
@pytest.mark.parametrize("pair", [pair for pair in PAIRS if "emulate" in str(pair)])
def test_conversation_goes_on_after_ended_runs(
    pair: str, open_session: Callable[..., SharedSession], on_cpu: list[tuple[Tokens, np.ndarray, float]],
    held_out: Tokens,
) -> None:  # fmt: skip
    """A long prompt is ended in ever later moments, before it is repeated; then the other device takes over."""
    session = open_session(pair, prompt_threshold="2")
    session(held_out[:2], 0)
    ended = 0
    for number in range(4):
        text, logits, bound = on_cpu[number]
        first = RUNS[number][0]
        options = onnxruntime.RunOptions()
        timer = threading.Timer(0.02 * 2**number, lambda options=options: setattr(options, "terminate", True))
        timer.start()
        try:
            # Far more tokens than belong there: they are forgotten like those of a rewind.
            session([*text[first:], *held_out[400 : 400 + CAPACITY - len(text) - 10]], first, options)
        except Exception as error:  # noqa: BLE001  # ORT's exceptions have no common base class
            assert "terminate flag" in str(error)  # noqa: PT017  # a run may be faster
            ended += 1
        timer.join()
        assert np.abs(session(text[first:], first) - logits).max() < bound, f"run from {first} on"
    assert ended > 0


@pytest.mark.opencl
def test_cache_lost_with_device_is_reported(
    open_session: Callable[..., SharedSession], double: Double, held_out: Tokens
) -> None:
    """Only the GPU has the prompt's keys and values."""
    session = open_session("gpu+cpu")
    session(held_out[:THRESHOLD], 0)
    double.inject("clEnqueueReadBuffer", 0, Way.LOST, -36)
    with pytest.raises(Exception, match="The session's next runs are on its CPU"):
        session(held_out[THRESHOLD : THRESHOLD + 1], THRESHOLD)
    with pytest.raises(Exception, match="lost with it: begin the conversation anew"):
        session(held_out[THRESHOLD : THRESHOLD + 1], THRESHOLD)
    session.cache = []
    assert np.isfinite(session(held_out[:THRESHOLD], 0)).all()


@pytest.mark.opencl
def test_switches_keep_memory(open_session: Callable[..., SharedSession], held_out: Tokens) -> None:
    """A leak of a cache of CAPACITY positions, 0.8 MB, at each switch would be 47 MB; allocators keep some MB."""
    session = open_session("gpu+cpu", prompt_threshold="2")
    process, used = psutil.Process(), []
    for _ in range(2):
        for switch in range(SWITCHES // 2):
            count, first = 1 + (switch + 1) % 2, switch // 2 * 3 % 240
            session(held_out[:count], first + 2 * (switch % 2))
        gc.collect()
        used.append(process.memory_info().rss)
    assert used[1] - used[0] < 24e6
