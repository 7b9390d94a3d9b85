# SPDX-License-Identifier: Apache-2.0
"""Times decoding behind long prompts, beside llama.cpp and OpenVINO GenAI.

    python -m benchmarks.engines.long_context MODEL --depth 16384 --against llama.cpp,openvino

`flownpu bench` reads the whole prompt anew for each repeat, for which peers take minutes. Here each engine is a process
that reads it once; then they generate in turn, round after round, behind what they have read. MODEL is a folder that
`flownpu convert` or `flownpu make-model` wrote; environments and converted models are those of `flownpu bench`.
"""

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.engines.process import EngineProcess
from flownpu.bench.roofline import read_bandwidth
from flownpu.peers import own_engine, prepare

_WORKER = Path(__file__).with_name("long_context_worker.py")


@dataclass
class Run:
    """An engine's process, the seconds of its prompt, and those of each round."""

    process: EngineProcess = field(repr=False)
    prompt_seconds: float = 0.0
    seconds: list[float] = field(default_factory=list)


def main(
    model: Annotated[Path, typer.Argument(help="Folder of a converted model.")],
    depth: Annotated[int, typer.Option(min=64, help="Tokens of the prompt.")] = 16384,
    generate: Annotated[int, typer.Option(min=1, help="Tokens a round.")] = 32,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds.")] = 9,
    against: Annotated[str, typer.Option(help="Peers of `flownpu bench`; none: FlowNPU alone.")] = "llama.cpp,openvino",
    threads: Annotated[int, typer.Option(min=1)] = len(os.sched_getaffinity(0)),
) -> None:
    """Measures the engines in turn."""
    settings = json.loads((model / "genai_config.json").read_text())["model"]
    context = depth + 4 + repeats * generate
    if context > settings["context_length"]:
        raise typer.BadParameter(f"{context} tokens do not fit the model's context of {settings['context_length']}")
    peers = filter(None, against.split(","))
    engines = [
        own_engine(model, provider="flownpu", options={}),
        *(prepare(name, model, say=typer.echo, progress=lambda _done, _total: None) for name in peers),
    ]
    runs = []
    for engine in engines:
        numbers = (str(number) for number in (threads, context, settings["vocab_size"]))
        command = [engine.python, "-P", _WORKER, engine.script, engine.model, *numbers, json.dumps(engine.options)]
        run = Run(EngineProcess(engine.name, command))
        run.process.answer()
        run.prompt_seconds = run.process.ask(read=depth)["seconds"]
        typer.echo(f"{engine.name}: read {depth} tokens in {run.prompt_seconds:.1f} s", err=True)
        runs.append(run)
    roofs = []
    for _ in range(repeats):
        roofs.append(read_bandwidth(threads) / 1e9)
        for run in runs:
            run.seconds.append(run.process.ask(generate=generate)["seconds"])
    table = Table(
        title=f"{model.name}, behind {depth} tokens: {generate} tokens in {repeats} rounds, {threads} threads, "
        f"read roof {median(roofs):.0f} GB/s"
    )
    for heading in ("engine", "prompt tokens/s", "new tokens/s", "least", "most", "first's times", "peak MB"):
        table.add_column(heading, justify="left" if heading == "engine" else "right")
    for run in runs:
        rates = [generate / seconds for seconds in run.seconds]
        paired = median(theirs / ours for theirs, ours in zip(run.seconds, runs[0].seconds, strict=True))
        decode = [f"{pick(rates):.1f}" for pick in (median, min, max)]
        peak = run.process.finish()["peak"] / 1e6
        table.add_row(run.process.name, f"{depth / run.prompt_seconds:.0f}", *decode, f"{paired:.2f}", f"{peak:.0f}")
    Console(width=120).print(table)


if __name__ == "__main__":
    typer.run(main)
