# SPDX-License-Identifier: Apache-2.0
"""Measures a model like `flownpu bench`, in turn with other engines or with another build of FlowNPU.

    python -m benchmarks.engines.decoders gemma3-1b --llama-cpp gemma-3-1b-Q4_0.gguf --python environment/bin/python
    python -m benchmarks.engines.decoders gemma3-1b --openvino FOLDER --ort-cpu FOLDER
    python -m benchmarks.engines.decoders gemma3-1b --llama-cpp gemma-3-1b-Q4_0.gguf --busy 1
    python -m benchmarks.engines.decoders gemma3-1b --build build/release/tests-python3.13/bin/python --repeats 10

runs at the root of the repository. Each engine reads a model in its own format: `llama_cpp.py` and `openvino_genai.py`
say how to install it and how to write that; `--ort-cpu` takes what onnxruntime_genai.models.builder writes.
"""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from flownpu.bench.measurement import Case, Engine, measure, own_engine
from flownpu.bench.report import BenchReport
from flownpu.bench.roofline import decode_traffic
from flownpu.machine import describe_machine, usable_cores
from flownpu.model.folder import read_genai_config

_HERE = Path(__file__).parent


def main(
    model: Annotated[Path, typer.Argument(help="Folder of a converted model.")],
    llama_cpp: Annotated[Path | None, typer.Option(help="GGUF file for llama.cpp.")] = None,
    openvino: Annotated[Path | None, typer.Option(help="Folder for OpenVINO GenAI.")] = None,
    openvino_f32: Annotated[bool, typer.Option(help="OpenVINO in f32 as well, which decodes faster on AMX.")] = False,
    ort_cpu: Annotated[Path | None, typer.Option(help="Folder for ORT GenAI on ONNX Runtime's CPU provider.")] = None,
    build: Annotated[Path | None, typer.Option(help="Python of an environment with another build.")] = None,
    python: Annotated[Path, typer.Option(help="Python of the other engines' environment.")] = Path(sys.executable),
    prompt: Annotated[list[int] | None, typer.Option(min=1, help="Tokens to read: 1024; repeatable.")] = None,
    generate: Annotated[int, typer.Option(min=2, help="Tokens to generate after them.")] = 64,
    depth: Annotated[int, typer.Option(min=0, help="Tokens in the context before the prompt.")] = 0,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds; the engines take turns in each.")] = 5,
    threads: Annotated[int, typer.Option(min=1)] = usable_cores(),
    busy: Annotated[int, typer.Option(min=0, help="Other processes that keep a core busy each.")] = 0,
) -> None:
    """Prints the table of `flownpu bench --markdown`, with a column and a ratio for each other engine."""
    settings = read_genai_config(model)["model"]
    cases = [Case(depth, length, generate) for length in prompt or [1024]]
    for case in cases:
        case.check(int(settings["context_length"]))
    own = own_engine(model, provider="flownpu", options={})
    engines = [own]
    if llama_cpp is not None:
        engines.append(Engine("llama.cpp", python, _HERE / "llama_cpp.py", llama_cpp))
    if openvino is not None:
        engines.append(Engine("openvino", python, _HERE / "openvino_genai.py", openvino))
        if openvino_f32:
            engines.append(replace(engines[-1], name="openvino f32", options={"INFERENCE_PRECISION_HINT": "f32"}))
    if ort_cpu is not None:
        engines.append(Engine("ort-cpu", own.python, own.script, ort_cpu, {"provider": "cpu"}))
    if build is not None:
        engines.append(Engine("other build", build.absolute(), own.script, model, own.options))
    vocabulary_size = int(settings["vocab_size"])
    found = measure(engines, cases, repeats=repeats, threads=threads, vocabulary_size=vocabulary_size, busy=busy)
    used = {"threads": threads, "busy": busy}
    report = BenchReport(describe_machine(), str(model), used, decode_traffic(model), found)
    print(report.markdown(), end="")


if __name__ == "__main__":
    typer.run(main)
