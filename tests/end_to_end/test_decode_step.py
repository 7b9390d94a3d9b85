# SPDX-License-Identifier: Apache-2.0
"""A decode step allocates no memory, and asks the system for nothing but to let its threads wait for each other.

`watch.cc`, preloaded into a process of its own, counts the calls that our library makes. Calls of ONNX Runtime and
GenAI do not count, even where our library calls into them.
"""

import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.built import BUILT

STEPS = 1100

SCRIPT = """
import ctypes, json, os, sys
import onnxruntime_genai as og
watcher, library, folder, prompt, steps, whole = sys.argv[1:]
watch = ctypes.CDLL(watcher)
watch.watch_name.restype = ctypes.c_char_p
og.register_execution_provider_library("FlowNPUExecutionProvider", library)
def start():
    assert watch.watch_start(b"libflownpu_ep.so")
if whole == "whole":
    start()
model = og.Model(folder)
parameters = og.GeneratorParams(model)
parameters.set_search_options(do_sample=False, min_length=int(prompt) + int(steps) + 8, max_length=2048)
generator = og.Generator(model, parameters)
generator.append_tokens([7 + i % 100 for i in range(int(prompt))])
for _ in range(4):
    generator.generate_next_token()
if whole != "whole":
    start()
for _ in range(int(steps)):
    generator.generate_next_token()
watch.watch_stop()
calls, number = {}, 0
while name := watch.watch_name(number):
    calls[name.decode()] = watch.watch_calls(number)
    number += 1
print(json.dumps({"tokens": len(generator.get_sequence(0)), "calls": calls}), flush=True)
os._exit(0)
"""


@pytest.fixture(scope="module")
def watched(
    library: Path, converted: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Any]:
    """The library's calls in decode steps, or in ("whole") loading, prompt and decode steps."""
    pytest.importorskip("onnxruntime_genai", reason="needs the extra genai")
    if platform.libc_ver()[0] != "glibc":
        pytest.skip(f"watch.cc is written for glibc, this is {platform.libc_ver()[0]}")
    if "LD_PRELOAD" in os.environ:
        pytest.skip("a sanitizer stands before malloc already")
    found = sorted(BUILT.glob("libflownpu_watch.so"))
    if not found:
        raise ImportError(f"expected libflownpu_watch.so in {BUILT}, found none: run `make test`")

    def count(prompt: int, part: str = "steps", **options: str) -> Any:
        folder = tmp_path_factory.mktemp("watched") / "model"
        folder.mkdir()
        source = converted()
        for path in source.iterdir():
            (folder / path.name).symlink_to(path)
        config = json.loads((source / "genai_config.json").read_text())
        config["model"]["decoder"]["session_options"]["provider_options"] = [{"FlowNPUExecutionProvider": options}]
        (folder / "genai_config.json").unlink()
        (folder / "genai_config.json").write_text(json.dumps(config))
        arguments = [str(found[0]), str(library), str(folder), str(prompt), str(STEPS), part]
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, *arguments],
            env={**os.environ, "LD_PRELOAD": str(found[0])},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        counts = json.loads(done.stdout.splitlines()[-1])
        assert counts["tokens"] == prompt + 4 + STEPS
        return counts["calls"]

    return count


# After the short prompts all growth happens in the steps, whose context passes several of attention's chunks.
@pytest.mark.parametrize(("prompt", "threads"), [(3, "2"), (900, "2"), (3, "1"), (40, "4")])
def test_decode_step_allocates_nothing_and_calls_only_waits(
    watched: Callable[..., Any], prompt: int, threads: str
) -> None:
    calls = watched(prompt, threads=threads)
    # A thread of the pool waits for others by spinning, then by yielding or on a futex.
    waits = set() if threads == "1" else {"sched_yield"}
    assert {name for name, count in calls.items() if count} <= waits


def test_loading_and_prompt_allocate_and_map(watched: Callable[..., Any]) -> None:
    """The file of weights is mapped, and workspaces are allocated."""
    calls = watched(3, "whole", threads="4")
    assert calls["malloc"] > 100
    assert calls["mmap"] >= 1
