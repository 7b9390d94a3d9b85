# SPDX-License-Identifier: Apache-2.0
"""Memory of the Gemma3-1B shape: weights are used where the file is mapped, once."""

import os
import subprocess
import sys
from pathlib import Path

from flownpu.convert.make_model import make_model

PROMPT_TOKENS = 256
CAPACITY = 1024
# Beside the file and the KV cache: Python, ONNX Runtime and GenAI (some 70 MB), logits, activations of the prompt.
ALLOWANCE = 200e6

GENERATE = r"""
import re, sys
import flownpu, numpy, onnxruntime_genai as og
flownpu.register()
model = og.Model(sys.argv[1])
parameters = og.GeneratorParams(model)
parameters.set_search_options(do_sample=False, max_length=int(sys.argv[3]))
generator = og.Generator(model, parameters)
generator.append_tokens(numpy.arange(int(sys.argv[2]), dtype=numpy.int32)[None] + 10)
for _ in range(4):
    generator.generate_next_token()
# Not getrusage, whose maximum a child inherits from the process that starts it.
print(int(re.search(r"VmHWM:\s+(\d+) kB", open("/proc/self/status").read())[1]) * 1024)
"""


def test_resident_memory_is_the_file_the_cache_and_little_more(tmp_path: Path) -> None:
    make_model("gemma3-1b", tmp_path / "model", context_length=CAPACITY)
    file = (tmp_path / "model" / "model.onnx.data").stat().st_size
    # 26 layers of one KV head of 256, K and V, bf16.
    cache = 26 * 2 * CAPACITY * 256 * 2
    command = [sys.executable, "-c", GENERATE, str(tmp_path / "model"), str(PROMPT_TOKENS), str(CAPACITY)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=dict(os.environ))
    peak = int(done.stdout.split()[-1])
    print(f"file {file / 1e6:.0f} MB, KV cache {cache / 1e6:.0f} MB, peak resident {peak / 1e6:.0f} MB")
    assert peak <= file + cache + ALLOWANCE
