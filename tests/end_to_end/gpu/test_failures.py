# SPDX-License-Identifier: Apache-2.0
"""Sessions whose GPU fails during a run (a double of OpenCL's loader): their errors, and the CPU's continuation."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.decoding import DecoderSession
from tests.end_to_end.conftest import Tokens
from tests.loader_double import Double, Way

pytestmark = [pytest.mark.opencl, pytest.mark.usefixtures("pocl")]

SHORT, LONG, STEPS = 12, 70, 4  # LONG: beyond the window of 64
LAUNCH = "clEnqueueNDRangeKernel"


class Text:
    """The same text in a session, step by step: the prompt, then tokens."""

    def __init__(self, folder: Path, devices: Any, tokens: Tokens, **options: str) -> None:
        """`tokens`: those of the prompt, and STEPS more."""
        self._decoder = DecoderSession(folder, devices, {"activations": "bf16"} | options)
        self._ids, self._prompt = np.array([tokens]), len(tokens) - STEPS

    def step(self, number: int) -> np.ndarray[Any, Any]:
        """Logits of the last token of this step."""
        end = self._prompt + number
        first = 0 if number == 0 else end - 1
        return self._decoder(self._ids[:, first:end], np.ones((1, end), np.int64))[0, -1]


@pytest.fixture
def open_text(converted: Callable[..., Path], ep_devices: Any, held_out: Tokens) -> Callable[..., Text]:
    folder = converted(kv_dtype="fp32")
    return lambda prompt=SHORT, **options: Text(folder, ep_devices[:1], held_out[: prompt + STEPS], **options)


def assert_near(ours: np.ndarray[Any, Any], theirs: np.ndarray[Any, Any]) -> None:
    """Asserts that two devices' logits differ by roundings only: each rounds activations to bf16, or not at all.

    6 layers have 24 products, each off by up to 2^-8, which add up like a random walk, relative to the logits' spread;
    4 sigma are allowed.
    """
    assert np.abs(ours - theirs).max() < 4 * theirs.std() * np.sqrt(12 * 2) * 2.0**-8


@pytest.mark.parametrize(("way", "failing"), [(Way.ONCE, 2), (Way.LATE, 0)])
def test_cpu_goes_on_from_same_cache_after_failure(
    way: Way, failing: int, open_text: Callable[..., Text], double: Double
) -> None:
    ours, theirs = open_text(LONG, device="gpu", on_unsupported="cpu"), open_text(LONG, device="cpu")
    for number in range(1 + STEPS):
        if number == failing:
            double.inject(LAUNCH, 20, way, -5)
            where = f"positions 0-{LONG - 1}" if number == 0 else f"position {LONG + number - 1}"
            with pytest.raises(Exception, match=rf"OUT_OF_RESOURCES.*\({where}\)\. The session's next runs are on its"):
                ours.step(number)
            double.reset()
        assert_near(ours.step(number), theirs.step(number))
        if number >= failing:
            assert double.calls(LAUNCH) == 0


@pytest.mark.parametrize("way", [Way.LOST, Way.HUNG])
def test_lost_device_reports_lost_cache(
    way: Way, open_text: Callable[..., Text], double: Double, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The KV cache is lost with the device, so the conversation begins anew on the CPU."""
    if way is Way.HUNG:
        first = open_text(device="gpu")  # This compiles the kernels, without a limit.
        first.step(0)
        first.step(1)
        monkeypatch.setenv("FLOWNPU_GPU_TIMEOUT", "3")  # seconds
    ours, theirs = open_text(device="gpu", on_unsupported="cpu"), open_text(device="cpu")
    ours.step(0)
    double.inject(LAUNCH, 20, way, -36)
    with pytest.raises(Exception, match=rf"\(position {SHORT}\)\. The session's next runs are on its CPU"):
        ours.step(1)
    with pytest.raises(Exception, match=r"lost with it: begin the conversation anew"):
        ours.step(1)
    ours._decoder.cache = []  # a new one
    for number in range(2):
        assert_near(ours.step(number), theirs.step(number))


def test_failure_without_fallback_ends_session(open_text: Callable[..., Text], double: Double) -> None:
    text = open_text(device="gpu")
    text.step(0)
    double.inject(LAUNCH, 1, Way.LOST, -36)
    with pytest.raises(Exception, match=r"INVALID_COMMAND_QUEUE.*on_unsupported=cpu its CPU would go on"):
        text.step(1)


def test_failed_session_is_error_or_runs_on_cpu(
    open_text: Callable[..., Text], double: Double, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The result is an error, or the CPU computes everything if it may; tests/ops/gpu/test_failures.py fails other
    calls.
    """
    monkeypatch.setenv("FLOWNPU_GPU_CACHE", "")
    double.inject("clCreateBuffer", 3, Way.ONCE, -4)
    with pytest.raises(Exception, match="CL_MEM_OBJECT_ALLOCATION_FAILURE"):
        open_text(device="gpu")
    double.inject("clCreateBuffer", 3, Way.ONCE, -4)
    text = open_text(device="gpu", on_unsupported="cpu")
    assert_near(text.step(0), open_text(device="cpu").step(0))


def test_cache_without_gpu_memory_runs_on_cpu(open_text: Callable[..., Text], double: Double) -> None:
    text = open_text(device="gpu", on_unsupported="cpu")
    double.inject("clCreateBuffer", 1, Way.ONCE, -4)
    assert_near(text.step(0), open_text(device="cpu").step(0))
    assert double.calls(LAUNCH) == 0
