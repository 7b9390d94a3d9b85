# SPDX-License-Identifier: Apache-2.0
"""Times from a picture to the first token: FlowNPU's CPU device, ONNX Runtime's CPU provider and OpenVINO GenAI.

    python -m benchmarks.engines.vision --layers 27

makes a Gemma3 of random weights with the public models' vision tower (`vision_checkpoint`), converts it with `flownpu
convert` and, for OpenVINO, exports it with optimum-intel, in an environment that is made once and kept. Each engine is
a process; they load one after the other and are then asked in turn, so that disturbances of the machine affect all of
them. Models and environment are kept in the cache folder (`scripts/environments.py`).
"""

import json
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.engines.process import EngineProcess
from benchmarks.engines.vision_checkpoint import write_checkpoint
from flownpu.convert import convert
from scripts.environments import cache_folder, finished_folder, make_environment, run

_WORKER = Path(__file__).with_name("vision_worker.py")
# Without torchvision: transformers can read pictures without it, and there is none for torch's CPU wheels.
_OPENVINO = ("openvino-genai==2026.4.1.0", "optimum-intel==2.2.0", "nncf==3.4.0", "torch==2.13.0", "pillow")
ENGINES = ("flownpu", "ort-cpu", "openvino")


@dataclass
class Engine:
    """A running engine, its times in seconds, and the sizes of its weights and memory in bytes."""

    name: str
    weights: int
    process: EngineProcess = field(repr=False)
    load_seconds: float = 0.0
    seconds: list[float] = field(default_factory=list)
    peak: int = 0

    def measure(self) -> float:
        """Seconds from the picture to the first token."""
        return float(self.process.ask()["seconds"])


def prepare(layers: int, weight_format: str) -> dict[str, tuple[Path, Path]]:
    """Each engine's Python interpreter and model folder, made unless they are there.

    Args:
        layers: layers of the vision tower.
        weight_format: format of OpenVINO's weights, "int8" or "fp16" (computed in bf16 where the processor has it).
    """
    root = cache_folder() / "vision" / f"{layers}-layers"
    with finished_folder(root / "checkpoint", layers) as folder:
        if folder is not None:
            write_checkpoint(folder, layers)
    with finished_folder(root / "flownpu", layers) as folder:
        if folder is not None:
            convert(root / "checkpoint", folder, force=True)
    python = make_environment("openvino-vision", _OPENVINO)
    exported = root / f"openvino-{weight_format}"
    with finished_folder(exported, layers) as folder:
        if folder is not None:
            tool, options = python.with_name("optimum-cli"), ["--task", "image-text-to-text", "--weight-format"]
            source = root / "checkpoint"
            run([tool, "export", "openvino", "-m", source, *options, weight_format, folder], root / "openvino.log")
    own = (Path(sys.executable), root / "flownpu")
    return {"flownpu": own, "ort-cpu": own, "openvino": (python, exported)}


def start(name: str, python: Path, folder: Path, threads: int) -> Engine:
    """Starts an engine, which loads its model and runs once to warm up."""
    process = EngineProcess(name, [python, _WORKER, name, folder, str(threads)])
    weights = sum(path.stat().st_size for path in folder.iterdir() if path.suffix in {".data", ".bin"})
    engine = Engine(name, weights, process)
    engine.load_seconds = process.answer()["load_seconds"]
    engine.measure()
    return engine


def main(
    layers: Annotated[int, typer.Option(min=1, help="Of the tower; the public models have 27.")] = 27,
    repeats: Annotated[int, typer.Option(min=1)] = 5,
    engines: Annotated[str, typer.Option(help=f"Of {', '.join(ENGINES)}.")] = ",".join(ENGINES),
    openvino_weights: Annotated[str, typer.Option(help="int8 or fp16.")] = "int8",
    threads: Annotated[int, typer.Option(min=1)] = len(os.sched_getaffinity(0)),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Measures the engines in turn."""
    ready = prepare(layers, openvino_weights)
    running = [start(name, *ready[name], threads) for name in engines.split(",")]
    for _ in range(repeats):
        for engine in running:
            engine.seconds.append(engine.measure())
    for engine in running:
        engine.peak = int(engine.process.finish()["peak"])
    if as_json:
        results = [{key: value for key, value in vars(engine).items() if key != "process"} for engine in running]
        print(json.dumps({"layers": layers, "threads": threads, "engines": results}, indent=2))
        return
    table = Table(title=f"picture to first token, {layers} layers, {threads} threads, {repeats} repeats in turn")
    for heading in ("engine", "median s", "least s", "most s", "times the first", "weights MB", "peak MB", "load s"):
        table.add_column(heading, justify="left" if heading == "engine" else "right")
    for engine in running:
        times = [f"{pick(engine.seconds):.2f}" for pick in (median, min, max)]
        ratio = f"{median(engine.seconds) / median(running[0].seconds):.2f}"
        memory = [f"{size / 1e6:.0f}" for size in (engine.weights, engine.peak)]
        table.add_row(engine.name, *times, ratio, *memory, f"{engine.load_seconds:.1f}")
    Console(width=120).print(table)


if __name__ == "__main__":
    typer.run(main)
