# SPDX-License-Identifier: Apache-2.0
"""Memory of the Gemma3-1B shape: weights are used where the file is mapped, once for all sessions."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flownpu.convert.make_model import make_model

PROMPT_TOKENS = 2048
CAPACITY = 2560
# Activations are those of one layer after the other, so 4 layers have the peak of all 26 but for weights and cache.
LAYERS = 4
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
