# SPDX-License-Identifier: Apache-2.0
"""`flownpu inspect`: what is in a model."""

import math
import re
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from flownpu.cli import options
from flownpu.cli.output import bytes_text, console, error_text, print_json, print_table
from flownpu.errors import FlowNPUError
from flownpu.model.integrity import damage
from flownpu.model.summary import Summary, Value, summarize


def inspect(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="MODEL",
            callback=options.model_folder,
            help="A model folder or its name, an .onnx or a .q4nx file.",
        ),
    ],
    as_json: options.AsJson = False,
    check: Annotated[
        bool, typer.Option("--check", help="Read all of a model folder's files and compare them with its manifest.")
    ] = False,
) -> None:
    """Show the contents of a model: operators, shapes, weights, KV cache, quantisation error."""
    if check and (found := damage(path)):
        raise FlowNPUError("\n  ".join([f"{path} is damaged; convert it again:", *found]))
    summary = summarize(path)
    if as_json:
        print_json({**asdict(summary), "weight_bytes": summary.weight_bytes})
        return
    console.print(summary.path)
    if summary.operators:
        print_table("operators", ["operator"], ["nodes"], [(k, str(n)) for k, n in summary.operators.items()])
        own = ", ".join(summary.functions) or "none"
        console.print(f"Operators defined in the model, for an ONNX Runtime without FlowNPU: {own}")
        print_table("inputs", ["name", "type", "shape"], [], _rows(summary.inputs))
        print_table("outputs", ["name", "type", "shape"], [], _rows(summary.outputs))
    print_table("weights", ["type"], ["tensors", "elements", "bytes"], _weight_rows(summary))
    if summary.kv_bytes_per_token:
        console.print(f"KV cache: {bytes_text(summary.kv_bytes_per_token)} a token in all layers together")
    if summary.other_graphs:
        others = ", ".join(summary.other_graphs)
        console.print(
            f"The model takes pictures; this is its decoder. Its other graphs, to inspect by themselves: {others}"
        )
    if summary.manifest:
        _print_manifest(summary.manifest)


def _rows(values: list[Value]) -> list[tuple[str, ...]]:
    """A row for each value. Values of layers that differ only in the number share a row: "past.*.key (26)"."""
    counts = Counter((re.sub(r"\d+", "*", value.name), value.type, *value.shape) for value in values)
    rows: list[tuple[str, ...]] = []
    for (name, kind, *dims), count in counts.items():
        shown = f"{name} ({count})" if "*" in str(name) else str(name)
        rows.append((shown, str(kind), " x ".join(map(str, dims)) or "scalar"))
    return rows


def _weight_rows(summary: Summary) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for kind, count in summary.weight_bytes.items():
        weights = [weight for weight in summary.weights if weight.type == kind]
        elements = sum(math.prod(weight.shape) for weight in weights)
        rows.append((kind, str(len(weights)), f"{elements:,}", bytes_text(count)))
    total = sum(summary.weight_bytes.values())
    return [*rows, ("all", str(len(summary.weights)), "", bytes_text(total))]


def _print_manifest(manifest: dict[str, Any]) -> None:
    """Prints the model's source, and the error of its weights."""
    source = manifest.get("source", {})
    console.print(f"Made of: {source.get('name')} ({source.get('kind')}, {source.get('model_type')})")
    for title in ("settings", "versions"):
        listed = ", ".join(f"{name} {value}" for name, value in manifest.get(title, {}).items())
        console.print(f"{title.capitalize()}: {listed}")
    quantisation = manifest.get("quantisation", {})
    for kind, treatment in quantisation.get("weights", {}).items():
        console.print(f"{kind}: {treatment}")
    vision = quantisation.get("vision", {})
    for title, errors in (
        ("", quantisation.get("relative_error")),
        (f" of the vision tower's weights, {vision.get('format')}", vision.get("relative_error")),
    ):
        if errors:
            console.print(error_text(f"Quantisation error{title}", errors))
