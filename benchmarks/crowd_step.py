# SPDX-License-Identifier: Apache-2.0
"""Splits the time of a step of many requests: GenAI's engine around the model, ONNX Runtime, FlowNPU's operators.

    flownpu make-model gemma3-1b gemma3-1b-paged --random --paged
    python -m benchmarks.crowd_step gemma3-1b-paged --requests 8

MODEL is a paged model. The wall time of `Engine.run` is measured here, the rest by ONNX Runtime's profiler in the same
runs, which takes some time itself. Only runs in which all requests decode count; shares are of their wall time.
"""

import json
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import onnxruntime_genai as og
import typer

from benchmarks.continuous_batching import Engine
from flownpu.generate.language_model import LanguageModel


def main(
    model: Annotated[Path, typer.Argument(help="Folder of a paged model.")],
    requests: Annotated[int, typer.Option(min=1, help="That decode together.")] = 8,
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of a prompt.")] = 256,
    steps: Annotated[int, typer.Option(min=2, help="Runs that are counted.")] = 32,
    sampled: Annotated[bool, typer.Option("--sampled", help="Tokens are drawn, not the likeliest taken.")] = False,
    activations: Annotated[str, typer.Option(help="bf16 or int8")] = "int8",
) -> None:
    """Prints milliseconds per run, and shares."""
    with tempfile.TemporaryDirectory() as scratch:
        prefix = Path(scratch) / "profile"
        opened = LanguageModel(model, options={"activations": activations}, profile=prefix)
        walls = _decode(opened, requests, prompt, steps, sampled=sampled)
        del opened  # the session writes the profile when it is deleted
        (path,) = prefix.parent.glob("profile*.json")
        events: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
    wall = sum(walls)
    runs = sorted((e for e in events if e["name"] == "model_run"), key=lambda e: float(e["ts"]))[-steps:]
    begun = float(runs[0]["ts"])
    run = sum(float(e["dur"]) for e in runs) * 1e-6
    operators: defaultdict[str, float] = defaultdict(float)
    for event in events:
        arguments = event.get("args", {})
        if arguments.get("provider") == "FlowNPUExecutionProvider" and "device" in arguments and event["ts"] >= begun:
            # The LM head is a product, too, with a row for each request; it is shown by itself.
            name = "LM head" if "lm_head" in event["name"] else arguments["op_name"]
            operators[name] += event["dur"] * 1e-6
    ours = sum(operators.values())
    parts = {
        "GenAI: scheduling, inputs, sampling, Python": wall - run,
        "ONNX Runtime, and ours between steps": run - ours,
    }
    parts |= dict(sorted(operators.items(), key=lambda part: -part[1]))
    print(
        f"{model.name}, {activations} activations: {requests} requests, {steps} runs, {1e3 * wall / steps:.1f} ms a run"
    )
    for name, seconds in parts.items():
        print(f"{name:45} {1e3 * seconds / steps:8.2f} ms {100 * seconds / wall:5.1f} %")


def _decode(model: LanguageModel, requests: int, prompt: int, steps: int, *, sampled: bool) -> list[float]:
    """Seconds of `steps` consecutive runs in which every request gets a token."""
    engine = Engine(model)
    random = np.random.default_rng(0)
    begun = [
        # More tokens than are counted, so that no request ends before.
        engine.begin(random.integers(8, model.vocabulary_size, prompt, dtype=np.int32), 4 * steps, sampled=sampled)
        for _ in range(requests)
    ]
    walls: list[float] = []
    while len(walls) < steps:
        started = time.perf_counter()
        events = engine.run()
        seconds = time.perf_counter() - started
        tokens = sum(bool(event.flags & og.EngineEventFlags.TOKEN) for event in events)
        # A run may return no events: its tokens then come with the next run's, and counting begins anew.
        walls = [*walls, seconds] if tokens == requests else []
    for request in begun:
        request.close()
    return walls


if __name__ == "__main__":
    typer.run(main)
