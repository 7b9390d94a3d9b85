# SPDX-License-Identifier: Apache-2.0
"""Runs sentence-transformers in a separate environment, because its ONNX backend needs optimum (`optimum_export.py`).

This file is also the script that runs in that environment.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

# Exact versions; 5.1 is the newest that takes transformers below 5, and imports scikit-learn and SciPy.
REQUIREMENTS = (
    "sentence-transformers==5.1.2",
    "scikit-learn==1.7.2",
    "scipy==1.16.3",
    "joblib==1.5.2",
    "threadpoolctl==3.6.0",
)


def environment() -> Path:
    """The interpreter of sentence-transformers' environment, which is made if there is none.

    Raises:
        FlowNPUError: pip failed.
    """
    from tests.rewrites import optimum_export

    return optimum_export.environment("sentence-transformers", REQUIREMENTS)


def encode(python: Path, runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Calls `embed` with each run's arguments, in one process of that environment, whose imports take seconds.

    Raises:
        RuntimeError: it failed; with the end of what it printed.
    """
    # -P keeps Python from putting this file's folder on its path.
    command = [str(python), "-P", __file__, json.dumps(runs, default=str)]
    done = subprocess.run(command, env=_environment(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"sentence-transformers failed:\n{(done.stdout + done.stderr)[-3000:]}")
    results: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return results


def export(python: Path, checkpoint: Path, folder: Path) -> Path:
    """Exports an encoder's checkpoint by optimum, in float32, with the files of sentence-transformers beside it."""
    shutil.copytree(checkpoint, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    made = folder.with_name(f"{folder.name}-made")
    command = [
        str(python),
        "-P",
        "-m",
        "optimum.commands.optimum_cli",
        "export",
        "onnx",
        "--task",
        "feature-extraction",
    ]
    command += ["--library", "transformers", "--model", str(checkpoint), str(made)]
    done = subprocess.run(command, env=_environment(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"optimum's export failed:\n{(done.stdout + done.stderr)[-3000:]}")
    shutil.move(made / "model.onnx", folder / "model.onnx")
    return folder


def _environment() -> dict[str, str]:
    return {**os.environ, "HF_HUB_OFFLINE": "1", "ORT_DISABLE_TELEMETRY": "1", "TOKENIZERS_PARALLELISM": "false"}


def embed(
    model: str,
    texts: list[str],
    provider: str,
    options: dict[str, str] | None = None,
    library: str = "",
    file_name: str = "model.onnx",
    rounds: int = 0,
) -> dict[str, Any]:
    """Embeds texts.

    Args:
        model: a folder for sentence-transformers with an ONNX graph.
        texts: what to embed.
        provider: the name of ONNX Runtime's execution provider.
        options: the provider's options.
        library: the path of FlowNPU's library, to be registered; empty: none.
        file_name: the name of the graph's file.
        rounds: how often to embed the texts again, taking the time.

    Returns:
        "vectors" [texts, D], and "seconds" of each round.
    """
    import onnxruntime
    from sentence_transformers import SentenceTransformer  # type: ignore[import-not-found]  # of its own environment

    known = {device.ep_name for device in onnxruntime.get_ep_devices()}
    if library and "FlowNPUExecutionProvider" not in known:
        onnxruntime.register_execution_provider_library("FlowNPUExecutionProvider", library)
    given = {"provider": provider, "provider_options": options or {}, "file_name": file_name, "export": False}
    opened = SentenceTransformer(model, backend="onnx", model_kwargs=given, device="cpu")
    vectors = opened.encode(texts)
    seconds = []
    for _ in range(rounds):
        started = time.perf_counter()
        opened.encode(texts)
        seconds.append(time.perf_counter() - started)
    return {"vectors": vectors.tolist(), "seconds": seconds}


if __name__ == "__main__":
    sys.stdout.write(json.dumps([embed(**run) for run in json.loads(sys.argv[1])]) + "\n")
