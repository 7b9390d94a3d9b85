# SPDX-License-Identifier: Apache-2.0
"""Splits the time of a decoded token by operators, beside the time that their bytes take at the memory's rate.

    flownpu make-model olmoe-1b-7b --random --symmetric --context-length 4096 olmoe
    python -m benchmarks.decode_parts olmoe --prompt 512

Times are those of ONNX Runtime's profile, which takes some time itself; each node's is the median over all tokens, so
that disturbances during some tokens do not count. `flownpu trace` has the sums.
"""

import json
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np
import typer

from flownpu.bench.roofline import DecodeTraffic, decode_traffic, read_bandwidth
from flownpu.generate.language_model import LanguageModel, Sampling
from flownpu.model.folder import read_genai_config

# Operators that take fewer seconds per token are not shown: the profile counts whole microseconds.
_LEAST = 1e-5


def main(
    model: Annotated[Path, typer.Argument(help="Folder of a model.")],
    prompt: Annotated[int, typer.Option(min=1, help="Tokens before those that are timed.")] = 512,
    generate: Annotated[int, typer.Option(min=1, help="Tokens that are timed.")] = 40,
    threads: Annotated[int, typer.Option(min=1)] = 2,
) -> None:
    """Prints milliseconds of a token's operators, their rates, and their time beyond what reading their bytes takes."""
    before = read_bandwidth(threads)
    walls, events = _decode(model, prompt, generate, threads)
    roof = max(before, read_bandwidth(threads))
    traffic, context = decode_traffic(model), prompt + generate // 2
    wall, least = median(walls), traffic.bytes_at(context) / roof
    print(f"{1e3 * wall:.2f} ms a token, {least / wall:.0%} of the roof of {roof / 1e9:.1f} GB/s")
    parts = _parts(events, generate, traffic, context)
    parts = {name: part for name, part in parts.items() if part[0] >= _LEAST}
    for name, (seconds, size) in sorted(parts.items(), key=lambda part: -part[1][0]):
        rate = f"{size / 1e6:7.1f} MB {size / seconds / 1e9:6.1f} GB/s" if size else ""
        print(f"{name:35} {1e3 * seconds:7.3f} ms, beyond its bytes {1e3 * (seconds - size / roof):7.3f}  {rate}")
    print(f"{'all else':35} {1e3 * (wall - sum(seconds for seconds, _ in parts.values())):7.3f} ms")


def _decode(model: Path, prompt: int, generate: int, threads: int) -> tuple[list[float], list[dict[str, Any]]]:
    """Seconds of each token, and the profile."""
    vocabulary = int(read_genai_config(model)["model"]["vocab_size"])
    ids = np.random.default_rng(0).integers(0, vocabulary, prompt, dtype=np.int32)
    with tempfile.TemporaryDirectory() as scratch:
        prefix = Path(scratch) / "profile"
        opened = LanguageModel(model, threads=threads, profile=prefix)
        length = prompt + generate + 1
        generator = opened.generator(length, Sampling(temperature=0), min_length=length)
        opened.append(generator, ids)
        generator.generate_next_token()  # comes from the prompt's logits
        walls = []
        for _ in range(generate):
            started = time.perf_counter()
            generator.generate_next_token()
            walls.append(time.perf_counter() - started)
        del generator, opened  # the session writes the profile when it is deleted
        (path,) = prefix.parent.glob("profile*.json")
        return walls, json.loads(path.read_text(encoding="utf-8"))


def _parts(
    events: list[dict[str, Any]], generate: int, traffic: DecodeTraffic, context: int
) -> dict[str, tuple[float, int]]:
    """Seconds and bytes of each of FlowNPU's operators, per token."""
    runs = sorted(float(event["ts"]) for event in events if event["name"] == "model_run")
    durations: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    for event in events:
        arguments = event.get("args", {})
        if arguments.get("provider") != "FlowNPUExecutionProvider" or "device" not in arguments:
            continue
        if float(event["ts"]) >= runs[-generate]:
            name = "LM head" if "lm_head" in event["name"] else arguments["op_name"]
            durations[name, event["name"]].append(float(event["dur"]) * 1e-6)
    parts: dict[str, tuple[float, int]] = {}
    for (operator, node), times in durations.items():
        seconds, size = parts.get(operator, (0.0, 0))
        parts[operator] = (seconds + median(times), size + traffic.node_bytes_at(node, context))
    return parts


if __name__ == "__main__":
    typer.run(main)
