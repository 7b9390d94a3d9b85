# SPDX-License-Identifier: Apache-2.0
"""Runs in an engine's own environment: converts a model for it, or measures it. numpy and the standard library only.

    python -P worker.py ENGINE.py convert EXPORTED OUTPUT
    python -P worker.py ENGINE.py convert_served EXPORTED OUTPUT
    python -P worker.py ENGINE.py measure REQUEST.json

ENGINE.py defines `convert(model: ExportedModel, output: Path)`, may define `convert_served` for a server that needs
another form, and has a class `Engine` with `version`, `start`, `read` and `generate_next`, like `llama_cpp.py`.

`measure` prints one JSON object per line on stdout; whatever else is printed goes to stderr. First comes
{"load_seconds", "version", "memory"}, then for each case {"prefill_seconds", "first_token_seconds", "decode_seconds"},
at the end {"memory", "placement"}; or {"error"}.
"""

import importlib.util
import json
import os
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np


def load(path: Path) -> ModuleType:
    """Imports a file under a name of its own, for a peer's file may have the name of the peer's package."""
    name = f"flownpu_peer_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def random_tokens(seed: int, count: int, vocabulary_size: int) -> Any:
    """Random token ids, int32 [count], the same on every machine; the work does not depend on the text."""
    return np.random.default_rng(seed).integers(0, vocabulary_size, count, dtype=np.int32)


def run_case(engine: Any, depth: int, prompt: int, generate: int, tokens: Any) -> dict[str, float]:
    """Computes `depth` tokens, then the prompt, then generates; the times are those of prompt and generation."""
    engine.start(depth + prompt + generate)
    if depth:
        engine.read(tokens[:depth])
    started = time.perf_counter()
    engine.read(tokens[depth : depth + prompt])
    read = time.perf_counter()
    engine.generate_next()
    first = time.perf_counter()
    for _ in range(generate - 1):
        engine.generate_next()
    done = time.perf_counter()
    return {"prefill_seconds": read - started, "first_token_seconds": first - started, "decode_seconds": done - first}


def measure(module: ModuleType, request: dict[str, Any], report: Any) -> None:
    """Loads the model, warms up, runs the cases."""
    memory = load(Path(__file__).with_name("memory.py")).memory
    before = memory()
    cases = request["cases"]
    context = max(case["depth"] + case["prompt"] + case["generate"] for case in cases)
    started = time.perf_counter()
    engine = module.Engine(
        Path(request["model"]), threads=request["threads"], context=context, options=request["options"]
    )
    report({"load_seconds": time.perf_counter() - started, "version": engine.version, "memory": before})
    # A first run brings the weights into memory, starts threads and compiles what an engine compiles at first use.
    shortest = min(case["prompt"] for case in cases)
    run_case(engine, 0, shortest, 4, random_tokens(0, shortest, request["vocabulary_size"]))
    for index, case in enumerate(cases, 1):
        # Other tokens in each case: an engine may remember what it has read.
        tokens = random_tokens(index, case["depth"] + case["prompt"], request["vocabulary_size"])
        report(run_case(engine, case["depth"], case["prompt"], case["generate"], tokens))
    report({"memory": memory(), "placement": getattr(engine, "placement", "")})


def main() -> None:
    """Runs the command line."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    engine, verb, *arguments = sys.argv[1:]
    module = load(Path(engine))
    if verb in ("convert", "convert_served"):
        exported = load(Path(__file__).with_name("exported.py"))
        getattr(module, verb)(exported.ExportedModel.read(Path(arguments[0])), Path(arguments[1]))
        return

    def report(document: dict[str, Any]) -> None:
        print(json.dumps(document), file=answers, flush=True)

    try:
        measure(module, json.loads(Path(arguments[0]).read_text(encoding="utf-8")), report)
    except Exception as error:
        # The engine's message goes to the user as it is.
        report({"error": str(error) or type(error).__name__})
        raise


if __name__ == "__main__":
    main()
