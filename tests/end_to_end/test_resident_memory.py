# SPDX-License-Identifier: Apache-2.0
"""Memory of the Gemma3-1B shape: weights are used where the file is mapped, once for all sessions."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flownpu.convert.make_model import make_model
from flownpu.npu.artifacts import build_artifacts

PROMPT_TOKENS = 2048
CAPACITY = 2560
# Activations are those of one layer after the other, so 2 layers have the peak of all 26 but for weights and cache.
LAYERS = 2
# One KV head of 256 a layer, K and V, bf16.
CACHE = LAYERS * 2 * CAPACITY * 256 * 2
# Beside the file and the KV cache: Python, ONNX Runtime and GenAI (some 70 MB), logits, activations of a slice of the
# prompt. Those of all its tokens would be 200 MB.
ALLOWANCE = 200e6

GENERATE = r"""
import json, re, sys
import numpy, onnxruntime_genai as og
library, folder, prompt, length, sessions = sys.argv[1:]
og.register_execution_provider_library("FlowNPUExecutionProvider", library)
alive, resident = [], []
for _ in range(int(sessions)):
    model = og.Model(folder)
    parameters = og.GeneratorParams(model)
    parameters.set_search_options(do_sample=False, max_length=int(length))
    generator = og.Generator(model, parameters)
    generator.append_tokens(numpy.arange(int(prompt), dtype=numpy.int32)[None] + 10)
    for _ in range(4):
        generator.generate_next_token()
    alive.append((model, generator))
    # A page that n mappings share counts as an n-th in each.
    rollup = open("/proc/self/smaps_rollup").read()
    resident.append(int(re.search(r"\nPss:\s+(\d+) kB", rollup)[1]) * 1024)
# Not getrusage, whose maximum a child inherits from the process that starts it.
status = open("/proc/self/status").read()
print(json.dumps({"peak": int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) * 1024, "resident": resident}))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Layers of the Gemma3-1B shape, with random weights."""
    folder = tmp_path_factory.mktemp("shape") / "model"
    make_model("gemma3-1b", folder, context_length=CAPACITY, layers=LAYERS)
    return folder


def generate(library: Path, folder: Path, prompt: int, sessions: int) -> Any:
    """Bytes: "peak", the most that were resident, and "resident", the process's share after each session's reply."""
    command = [sys.executable, "-c", GENERATE, str(library), str(folder), str(prompt), str(CAPACITY), str(sessions)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=dict(os.environ))
    return json.loads(done.stdout.splitlines()[-1])


def test_resident_memory_is_file_cache_and_little_more(library: Path, folder: Path) -> None:
    file = (folder / "model.onnx.data").stat().st_size
    peak = generate(library, folder, PROMPT_TOKENS, 1)["peak"]
    print(f"file {file / 1e6:.0f} MB, KV cache {CACHE / 1e6:.0f} MB, peak resident {peak / 1e6:.0f} MB")
    assert peak <= file + CACHE + ALLOWANCE


def test_second_session_shares_weights(library: Path, folder: Path) -> None:
    first, second = generate(library, folder, 64, 2)["resident"]
    # The filled part of its KV cache, and its workspace, which is small after a prompt of 64 tokens.
    file = (folder / "model.onnx.data").stat().st_size
    more = second - first
    print(f"file {file / 1e6:.0f} MB, the first session {first / 1e6:.0f} MB, the second {more / 1e6:.0f} MB more")
    assert more <= CACHE + 50e6 < file / 3


# Prints what a session adds to the memory that belongs to no file.
OPEN = r"""
import re, sys
import onnxruntime
library, model, device, artifacts, report = sys.argv[1:]
onnxruntime.register_execution_provider_library("FlowNPUExecutionProvider", library)
devices = [found for found in onnxruntime.get_ep_devices() if found.ep_name == "FlowNPUExecutionProvider"]
def anonymous():
    return int(re.search(r"\nAnonymous:\s+(\d+) kB", open("/proc/self/smaps_rollup").read())[1]) * 1024
options, before = onnxruntime.SessionOptions(), anonymous()
choice = {"device": device, "artifacts": artifacts, "placement": report}
options.add_provider_for_devices(devices[:1], choice)
session = onnxruntime.InferenceSession(model, options)
print(anonymous() - before)
"""
EMULATED_SIDES = 2  # an emulated buffer has a host's and a device's memory, so that a forgotten transfer shows


def test_second_device_copies_weights_as_often_as_report_says(library: Path, tmp_path: Path) -> None:
    """The array has a copy, and the CPU beside it none."""
    folder, artifacts, report = (tmp_path / name for name in ("model", "artifacts", "placement.json"))
    make_model("gemma3-1b", folder, context_length=64, layers=1)
    build_artifacts(folder, context=64, output=artifacts)

    def added(device: str) -> int:
        command = [sys.executable, "-c", OPEN, library, folder / "model.onnx", device, artifacts, report]
        return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])

    cpu, pair = added("cpu"), added("emulate+cpu")
    summary = json.loads(report.read_text())["summary"]
    found = re.search(r"weights of (\d+) bytes in the file's pages and once more in a device's memory", summary)
    assert found
    weights = int(found[1])
    print(f"weights {weights / 1e6:.0f} MB, cpu {cpu / 1e6:.0f} MB more, emulate+cpu {pair / 1e6:.0f} MB more")
    assert 0.95 * (folder / "model.onnx.data").stat().st_size < weights
    # The caches and buffers of one layer, the kernels' library and allocators take less than a third copy.
    assert cpu < weights / 10
    assert EMULATED_SIDES * weights <= pair < (EMULATED_SIDES + 0.4) * weights
