# SPDX-License-Identifier: Apache-2.0
"""Cases as files: NAME.onnx, and NAME.npz with what it is run with and how; of a finding NAME.txt as well."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from tests.fuzz.graphs import Case

if TYPE_CHECKING:
    from pathlib import Path

    from tests.fuzz.oracle import Finding

HOW = "case"  # options and more, as JSON, among the arrays


def save_case(case: Case, stem: Path) -> None:
    """Writes STEM.onnx and STEM.npz."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    stem.with_name(stem.name + ".onnx").write_bytes(case.model)
    arrays: dict[str, Any] = {}
    types = {}
    for run, feed in enumerate(case.feeds):
        for name, array in feed.items():
            key = f"{run}.{name}"
            # numpy's files do not know bfloat16.
            types[key] = array.dtype.name
            arrays[key] = array.view(np.uint16) if array.dtype == ml_dtypes.bfloat16 else array
    how = {"options": case.options, "optimise": case.optimise, "runs": len(case.feeds), "types": types}
    arrays[HOW] = np.array(json.dumps(how))
    np.savez_compressed(stem.with_name(stem.name + ".npz"), **arrays)


def load_case(path: Path) -> Case:
    """Reads the case of a .onnx file and its .npz."""
    with np.load(path.with_suffix(".npz")) as stored:
        how = json.loads(str(stored[HOW]))
        feeds: list[dict[str, Any]] = [{} for _ in range(how["runs"])]
        for key, dtype in how["types"].items():
            run, _, name = key.partition(".")
            array = stored[key]
            feeds[int(run)][name] = array.view(ml_dtypes.bfloat16) if dtype == "bfloat16" else array
    return Case(path.read_bytes(), feeds, how["options"], how["optimise"])


def save_finding(case: Case, finding: Finding, folder: Path) -> Path:
    """Writes a finding; the path of its model."""
    name = re.sub(r"[^A-Za-z0-9]+", "-", finding.signature)[:80].strip("-").lower()
    stem = folder / name
    number = 1
    while stem.with_name(stem.name + ".onnx").exists():
        number += 1
        stem = folder / f"{name}-{number}"
    save_case(case, stem)
    model = stem.with_name(stem.name + ".onnx")
    text = f"{finding.signature}\n\n{finding.text}\n\n{listing(case)}\n\npython -m tests.fuzz replay {model}\n"
    stem.with_name(stem.name + ".txt").write_text(text)
    return model


def listing(case: Case) -> str:
    """The model in ONNX's text syntax, shortened, and what it is run with."""
    import onnx

    lines = [f"options {case.options}, optimise {case.optimise}"]
    lines.append(
        re.sub(r"=\s*\{[^{}]{160,}\}", "= {..}", onnx.printer.to_text(onnx.load_from_string(case.model)))[:6000]
    )
    with np.printoptions(threshold=20):
        for run, feed in enumerate(case.feeds):
            lines += [f"run {run}, {name}: {a.dtype}{list(a.shape)} {a!s}"[:400] for name, a in feed.items()]
    return "\n".join(lines)
