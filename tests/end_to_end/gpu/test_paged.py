# SPDX-License-Identifier: Apache-2.0
"""Paged models on device=gpu, on each API: sequences that share the cache's blocks get the cpu device's numbers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flownpu.generate.engine_worker import EngineWorker
from flownpu.generate.language_model import LanguageModel
from flownpu.generate.worker import Request
from tests.decoding import PagedSession
from tests.end_to_end.conftest import Tokens
from tests.loader_double import Double, Way
from tests.serve.test_engine_worker import GREEDY, TEXTS, Answer

pytestmark = [pytest.mark.opencl, pytest.mark.usefixtures("gpu_api")]

BLOCKS = 300
CHUNK = 256
# New tokens of each sequence in each call, beyond the window of 64: a prompt, another one beside a token, parts of
# prompts beside tokens, one longer than a chunk of 256, tokens of all, and tokens of one alone. From 256 keys on
# several work-groups share a token's attention.
CALLS = [
    {"a": 20},
    {"a": 1, "b": 66},
    {"c": CHUNK + 9, "a": 4, "b": 1},
    {"a": 1, "b": 1, "c": 13},
    {"a": 1, "b": 1, "c": 1},
    {"c": 1},
    {"b": 1},
]
FIRST = {"a": 0, "b": 50, "c": 200}  # of the held-out text


@pytest.fixture
def open_session(converted: Callable[..., Path], ep_devices: Any, gpu_api: str) -> Callable[..., PagedSession]:
    def opened(device: str, **options: str) -> PagedSession:
        given = {"device": device, "activations": "bf16"} | ({} if device == "cpu" else {"gpu_api": gpu_api})
        session = PagedSession(converted(paged=True), ep_devices[:1], given | options, BLOCKS)
        session.free.reverse()  # the first that is taken is block 0, whose first bytes are the device's ticket
        return session

    return opened


def run(session: PagedSession, calls: list[dict[str, int]], text: Tokens) -> np.ndarray[Any, Any]:
    """Logits of the last token of each sequence in each call, [.., V]."""
    logits: list[np.ndarray[Any, Any]] = []
    for call in calls:
        work = {}
        for name, count in call.items():
            first = FIRST[name] + session.tokens.get(name, 0)
            work[name] = np.array(text[first : first + count])
        logits += session(work).values()
    return np.array(logits)


def go_on_from(other: PagedSession, session: PagedSession) -> None:
    """Copies what another session's caller holds: caches and tables."""
    for mine, its in zip(session._memory, other._memory, strict=True):
        mine[:] = its
    session.tables = {name: list(table) for name, table in other.tables.items()}
    session.tokens, session.free = dict(other.tokens), list(other.free)


def assert_near(ours: np.ndarray[Any, Any], theirs: np.ndarray[Any, Any]) -> None:
    """Asserts that the devices' logits differ by roundings only.

    The CPU rounds the activations of 24 products to bf16, and the keys and values of 6 layers are rounded by both, from
    numbers that differ: 36 roundings of up to 2^-8 of a value, which add up like a random walk; 4 sigma are allowed.
    """
    assert np.abs(ours - theirs).max() < 4 * theirs.std() * np.sqrt(36) * 2.0**-8


def test_logits_of_sequences_together_equal_cpu(
    open_session: Callable[..., PagedSession], held_out: Tokens, gpu_api: str
) -> None:
    """Vulkan's kernels are the optimised ones, and so read the prompt that is longer than a chunk."""
    calls = [{**call, "c": 50} if call.get("c", 0) > CHUNK and gpu_api == "opencl" else call for call in CALLS]
    ours, theirs = open_session("gpu", on_unsupported="error"), open_session("cpu")
    assert_near(run(ours, calls, held_out), run(theirs, calls, held_out))
    # A sequence whose beginning is another's: it reads the same blocks.
    for session in (ours, theirs):
        session.tables["a"], session.tokens["a"] = session.tables["c"][: 48 // PagedSession.BLOCK], 48
    assert_near(run(ours, [{"a": 9}, {"a": 1, "c": 1}], held_out), run(theirs, [{"a": 9}, {"a": 1, "c": 1}], held_out))


def test_caches_of_cpu_continue_on_gpu(open_session: Callable[..., PagedSession], held_out: Tokens) -> None:
    """Blocks that the device has not seen are taken from the host's memory when a sequence first names them: those of a
    sequence of several work-groups, too."""
    cpu, gpu = open_session("cpu"), open_session("gpu")
    run(cpu, CALLS[:3], held_out)
    go_on_from(cpu, gpu)
    calls = [{"b": 2}, {"c": 1, "a": 1}, {"a": 1, "b": 1}]
    assert_near(run(gpu, calls, held_out), run(cpu, calls, held_out))


@pytest.mark.parametrize("gpu_api", ["opencl"], indirect=True)
def test_caches_that_are_gone_are_refused(open_session: Callable[..., PagedSession], held_out: Tokens) -> None:
    first, other = open_session("gpu"), open_session("gpu")
    run(first, CALLS[:1], held_out)
    go_on_from(first, other)
    with pytest.raises(Exception, match="stands for a KV cache that is gone: begin the conversations anew"):
        run(other, [{"a": 1}], held_out)


@pytest.mark.parametrize("gpu_api", ["opencl"], indirect=True)
def test_cpu_goes_on_from_same_blocks_after_failure(
    open_session: Callable[..., PagedSession], held_out: Tokens, double: Double
) -> None:
    ours, theirs = open_session("gpu", on_unsupported="cpu"), open_session("cpu")
    run(ours, CALLS[:2], held_out)
    run(theirs, CALLS[:2], held_out)
    double.inject("clEnqueueNDRangeKernel", 20, Way.ONCE, -5)
    with pytest.raises(Exception, match=r"\(position 21\)\. The session's next runs are on its CPU"):
        run(ours, CALLS[3:4], held_out)
    double.reset()
    assert_near(run(ours, CALLS[3:], held_out), run(theirs, CALLS[3:], held_out))
    assert double.calls("clEnqueueNDRangeKernel") == 0


@pytest.mark.usefixtures("genai")
@pytest.mark.parametrize("gpu_api", ["vulkan"], indirect=True)
def test_answers_to_many_clients_equal_cpu(converted: Callable[..., Path], gpu_api: str) -> None:
    texts = []
    for device in ({"device": "gpu", "gpu_api": gpu_api}, {"device": "cpu"}):
        model = LanguageModel(converted(paged=True), options=device | {"activations": "bf16"})
        worker = EngineWorker(model, context=256)
        try:
            requests = [Request(model.tokens_of_text(text), 16, GREEDY) for text in TEXTS[:5]]
            answers = [Answer(worker, request) for request in requests]
            for answer in answers:
                answer.end()
            texts.append([answer.text for answer in answers])
        finally:
            worker.close()
    assert texts[0] == texts[1]
