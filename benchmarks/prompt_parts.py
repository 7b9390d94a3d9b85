# SPDX-License-Identifier: Apache-2.0
"""Splits the time of a prompt by operators, beside the time of its products at the roof of int8 dot products.

    flownpu make-model gemma3-1b --random --symmetric gemma3-1b
    python -m benchmarks.prompt_parts gemma3-1b --shape gemma3-1b --prompt 1024,4096

The parts are those of ONNX Runtime's profile of the fastest run; profiling takes some time itself. The roof is measured
before each run, and the largest counts.
"""

import json
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks.machine.kernels import products
from benchmarks.machine.roofs import measure_roofs
from flownpu.convert.families import read_decoder
from flownpu.generate.language_model import LanguageModel, Sampling
from flownpu.model.shapes import SHAPES
from flownpu.ops import q4nx


def main(
    model: Annotated[Path, typer.Argument(help="Folder of a model.")],
    shape: Annotated[str, typer.Option(help=f"Its shape, of {', '.join(SHAPES)}.")] = "gemma3-1b",
    prompt: Annotated[str, typer.Option(help="Tokens of a prompt; each is a measurement.")] = "1024,4096",
    repeats: Annotated[int, typer.Option(min=1)] = 5,
    threads: Annotated[int, typer.Option(min=1)] = 2,
) -> None:
    """Prints milliseconds of a prompt's parts, and shares."""
    decoder = read_decoder(SHAPES[shape])
    for tokens in [int(part) for part in prompt.split(",")]:
        roof, walls, events = _measure(model, tokens, repeats, threads)
        best = int(np.argmin(walls))
        kernels = [
            k for k in products(decoder, tokens, "avx512", "int8", threads, q4nx.SYMMETRIC) if k.name != "LM head"
        ]
        least = sum(k.operations for k in kernels) * len(decoder.layers) / roof
        runs = sorted((e for e in events if e["name"] == "model_run"), key=lambda e: float(e["ts"]))[1:]
        parts = _parts(events, _runs_of(runs, repeats)[best])
        wall = walls[best]
        print(
            f"{model.name}, {tokens} tokens: {1e3 * wall:.0f} ms, {tokens / wall:.1f} tokens/s, {least / wall:.0%} of ",
            end="",
        )
        print(f"{tokens / least:.1f}, which its products would have at {roof / 1e9:.0f} GOP/s of int8")
        for name, seconds in sorted(parts.items(), key=lambda part: -part[1]):
            print(f"{name:45} {1e3 * seconds:8.1f} ms {seconds / wall:6.1%}")
        print(f"{'all else':45} {1e3 * (wall - sum(parts.values())):8.1f} ms {1 - sum(parts.values()) / wall:6.1%}")


def _measure(model: Path, tokens: int, repeats: int, threads: int) -> tuple[float, list[float], list[dict[str, Any]]]:
    """The roof, the seconds of each prompt, and the profile of a short prompt and of these."""
    with tempfile.TemporaryDirectory() as scratch:
        prefix = Path(scratch) / "profile"
        opened = LanguageModel(model, options={"activations": "int8"}, threads=threads, profile=prefix)
        random = np.random.default_rng(0)
        roofs, walls = [], []
        for count in [32, *[tokens] * repeats]:
            roofs.append(measure_roofs(threads).int8_dot)
            generator = opened.generator(count + 1, Sampling(temperature=0))
            ids = random.integers(8, 1000, count, dtype=np.int32)
            started = time.perf_counter()
            opened.append(generator, ids)
            walls.append(time.perf_counter() - started)
            del generator
        del opened  # the session writes the profile when it is deleted
        (path,) = prefix.parent.glob("profile*.json")
        return max(roofs), walls[1:], json.loads(path.read_text(encoding="utf-8"))


def _runs_of(runs: list[dict[str, Any]], repeats: int) -> list[list[dict[str, Any]]]:
    """The runs of the model by repeat: a long prompt takes several runs, the same number in each repeat."""
    each = len(runs) // repeats
    return [runs[i * each : (i + 1) * each] for i in range(repeats)]


def _parts(events: list[dict[str, Any]], runs: list[dict[str, Any]]) -> dict[str, float]:
    """Seconds of each of FlowNPU's operators in the runs."""
    begin = float(runs[0]["ts"])
    end = float(runs[-1]["ts"]) + float(runs[-1]["dur"])
    operators: defaultdict[str, float] = defaultdict(float)
    for event in events:
        arguments = event.get("args", {})
        if arguments.get("provider") != "FlowNPUExecutionProvider" or "device" not in arguments:
            continue
        if begin <= float(event["ts"]) < end:
            name = "LM head" if "lm_head" in event["name"] else arguments["op_name"]
            operators[name] += float(event["dur"]) * 1e-6
    return dict(operators)


if __name__ == "__main__":
    typer.run(main)
