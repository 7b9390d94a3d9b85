# SPDX-License-Identifier: Apache-2.0
"""A decode step allocates no memory, and makes only those system calls by which its threads wait for each other.

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

BUILT = Path(os.environ.get("FLOWNPU_TESTING_DIR", Path(__file__).parents[2] / "build" / "testing"))
# x86-64's numbers. A thread of the pool waits for others by spinning, then by yielding or on a futex. If the system has
# moved the caller to a worker's core, the worker gets the caller's former core.
FUTEX, SCHED_YIELD, SCHED_SETAFFINITY = 202, 24, 203
STEPS = 1100

SCRIPT = """
import ctypes, json, os, sys
import onnxruntime_genai as og
watcher, library, folder, prompt, steps, whole = sys.argv[1:]
watch = ctypes.CDLL(watcher)
og.register_execution_provider_library("FlowNPUExecutionProvider", library)
def start():
    if error := watch.watch_start(b"libflownpu_ep.so"):
        print(json.dumps({"refused": error}), flush=True)
        os._exit(0)
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
calls = {number: watch.watch_calls(number) for number in range(512)}
print(json.dumps({"tokens": len(generator.get_sequence(0)), "allocations": watch.watch_allocations(),
                  "calls": {number: count for number, count in calls.items() if count}}), flush=True)
os._exit(0)  # Threads that end block all signals, the watcher's too.
"""


@pytest.fixture(scope="module")
def watched(
    library: Path, converted: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Any]:
    """The library's allocations and system calls in decode steps, or in ("whole") loading, prompt and decode steps."""
    pytest.importorskip("onnxruntime_genai", reason="needs the extra genai")
    if platform.machine() != "x86_64" or platform.libc_ver()[0] != "glibc":
        pytest.skip(f"watch.cc is written for x86-64 and glibc, this is {platform.machine()} {platform.libc_ver()[0]}")
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
        if error := counts.get("refused"):
            pytest.skip(f"this system refuses seccomp: {os.strerror(error)}")
        assert counts["tokens"] == prompt + 4 + STEPS
        return counts

    return count


# After the short prompts all growth happens in the steps, whose context passes several of attention's chunks.
@pytest.mark.parametrize(("prompt", "threads"), [(3, "2"), (900, "2"), (3, "1"), (40, "4")])
def test_decode_step_allocates_nothing_and_calls_only_waits(
    watched: Callable[..., Any], prompt: int, threads: str
) -> None:
    counts = watched(prompt, threads=threads)
    assert counts["allocations"] == 0
    waits = set() if threads == "1" else {str(FUTEX), str(SCHED_YIELD), str(SCHED_SETAFFINITY)}
    assert set(counts["calls"]) <= waits


def test_loading_and_prompt_allocate_and_map(watched: Callable[..., Any]) -> None:
    # Threads are started with stacks that are mapped (mmap is call 9), and workspaces are allocated.
    counts = watched(3, "whole", threads="4")
    assert counts["allocations"] > 100
    assert counts["calls"].get("9", 0) >= 3
