# SPDX-License-Identifier: Apache-2.0
"""Cases as files: NAME.npz with the model, its inputs and options, and for a finding NAME.txt with its description."""

import json
import re
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx

from tests.fuzz.decoders.models import DecoderModel
from tests.fuzz.decoders.oracle import DecoderCase, DecoderOracle, describe
from tests.fuzz.decoders.runs import Turn
from tests.fuzz.graphs.strategy import Case
from tests.fuzz.oracle import Finding, Oracle, Verdict
from tests.fuzz.worker import Worker

HOW, MODEL = "how", "model"  # keys of NAME.npz with options and more, as JSON, and with the bytes of the ONNX file


def save_case(case: Case | DecoderCase, path: Path) -> None:
    """Writes a .npz file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    arrays, how = _graph(case) if isinstance(case, Case) else _decoder(case)
    model = case.model if isinstance(case, Case) else case.decoder.model
    arrays[MODEL] = np.frombuffer(model, np.uint8)
    arrays[HOW] = np.array(json.dumps({"options": case.options, "optimise": case.optimise, **how}))
    np.savez_compressed(path, **arrays)


def _graph(case: Case) -> tuple[dict[str, Any], dict[str, Any]]:
    arrays, types = {}, {}
    for run, feed in enumerate(case.feeds):
        for name, array in feed.items():
            # numpy's files do not know bfloat16.
            types[f"{run}.{name}"] = array.dtype.name
            arrays[f"{run}.{name}"] = array.view(np.uint16) if array.dtype == ml_dtypes.bfloat16 else array
    return arrays, {"runs": len(case.feeds), "types": types}


def _decoder(case: DecoderCase) -> tuple[dict[str, Any], dict[str, Any]]:
    arrays = {}
    for i, step in enumerate(case.steps):
        arrays[f"{i}.ids"], arrays[f"{i}.mask"] = step.ids, step.mask
    sizes = {name: value for name, value in vars(case.decoder).items() if name != "model"}
    pasts = [step.past for step in case.steps]
    return arrays, {"decoder": sizes, "pasts": pasts, "lengths": case.lengths, "capacity": case.capacity}


def load_case(path: Path) -> Case | DecoderCase:
    """Reads the case of a .npz file."""
    with np.load(path) as stored:
        model = stored[MODEL].tobytes()
        how = json.loads(str(stored[HOW]))
        settings = {"options": how["options"], "optimise": how["optimise"]}
        if "decoder" in how:
            steps = [Turn(stored[f"{i}.ids"], stored[f"{i}.mask"], past) for i, past in enumerate(how["pasts"])]
            decoder = DecoderModel(model=model, **how["decoder"])
            return DecoderCase(decoder, steps, how["lengths"], how["capacity"], **settings)
        feeds: list[dict[str, Any]] = [{} for _ in range(how["runs"])]
        for key, dtype in how["types"].items():
            run, _, name = key.partition(".")
            array = stored[key]
            feeds[int(run)][name] = array.view(ml_dtypes.bfloat16) if dtype == "bfloat16" else array
    return Case(model, feeds, **settings)


def judge_saved(case: Case | DecoderCase, reference: Worker, ours: Worker) -> Verdict:
    """Runs and judges a case that was loaded."""
    if isinstance(case, Case):
        return Oracle(reference, ours).judge(case)
    return DecoderOracle(reference, ours).judge(case)


def save_finding(case: Case | DecoderCase, finding: Finding, folder: Path) -> Path:
    """Writes a finding's files; returns the path of its case."""
    name = re.sub(r"[^A-Za-z0-9]+", "-", finding.signature)[:80].strip("-").lower()
    path, number = folder / f"{name}.npz", 1
    while path.exists():
        number += 1
        path = folder / f"{name}-{number}.npz"
    save_case(case, path)
    text = listing(case) if isinstance(case, Case) else describe(case)
    command = f"python -m tests.fuzz replay {path}"
    path.with_suffix(".txt").write_text(f"{finding.signature}\n\n{finding.text}\n\n{text}\n\n{command}\n")
    return path


def listing(case: Case) -> str:
    """The model in ONNX's text syntax, shortened, and its options and inputs."""
    lines = [f"options {case.options}, optimise {case.optimise}"]
    text = onnx.printer.to_text(onnx.load_from_string(case.model))
    lines.append(re.sub(r"=\s*\{[^{}]{160,}\}", "= {..}", text)[:6000])
    with np.printoptions(threshold=20):
        for run, feed in enumerate(case.feeds):
            lines += [f"run {run}, {name}: {a.dtype}{list(a.shape)} {a!s}"[:400] for name, a in feed.items()]
    return "\n".join(lines)
