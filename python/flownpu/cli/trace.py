# SPDX-License-Identifier: Apache-2.0
"""`flownpu trace`: the times of a generation, as a file for Perfetto and as a table."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from flownpu.bench.roofline import read_bandwidth
from flownpu.bench.tracing import OperatorTime, Trace, make_trace, record, write_trace
from flownpu.cli import options
from flownpu.cli.output import bytes_text, console, print_json, print_table, seconds_text, status
from flownpu.machine import describe_machine

_PROMPT = "The quick brown fox jumps over the lazy dog."


def trace(
    model: options.ModelFolder,
    prompt: Annotated[str, typer.Option("--prompt", "-p", metavar="TEXT", help="The prompt.")] = _PROMPT,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Tokens to generate.")] = 8,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="The trace to write; .gz compresses it.")
    ] = Path("trace.json"),
    device: options.DeviceOption = None,
    activations: options.ActivationsOption = None,
    threads: options.Threads = None,
    option: options.Option = None,
    as_json: options.AsJson = False,
) -> None:
    """Record a generation on one clock: ONNX Runtime's nodes, the provider's steps and dispatches.

    It has the host's work between dispatches, too, and a GPU's kernels by the GPU's clock. Open the file at
    https://ui.perfetto.dev. The table says what each operator of a decode step reads and how fast, beside the speed of
    main memory; the times of the NPU's array are estimated from the designs' plans, not measured.
    """
    chosen = options.provider_options(device, activations, option)
    profile = record(model, prompt, max_new_tokens, chosen, threads)
    result = make_trace(model, profile, _artifacts(model, profile.placement, chosen))
    write_trace(result, output)
    roof = read_bandwidth(threads)
    if as_json:
        print_json({
            "trace": str(output),
            "placement": profile.placement,
            "machine": asdict(describe_machine()),
            "read_roof": roof,
            "operators": [asdict(operator) | {"rate": operator.rate} for operator in result.operators],
            "per_token": result.counts,
        })  # fmt: skip
        return
    _print(result, roof)
    status(f"{output}: {bytes_text(output.stat().st_size)}. Open it at https://ui.perfetto.dev")
    status(profile.placement["summary"])


def _artifacts(model: Path, placement: dict[str, object], chosen: dict[str, str]) -> Path | None:
    """The folder of the device's compiled designs; None for a device without any."""
    name = next((name for name in ("npu", "emulate") if f"{name} (" in str(placement["device"])), None)
    if name is None:
        return None
    if chosen.get("artifacts"):
        return Path(chosen["artifacts"])
    return model / "artifacts" / ("emulate" if name == "emulate" else "npu2")


def _print(result: Trace, roof: float) -> None:
    print_table(
        "operators of decode steps, the NPU's calls, and what the host computes between them",
        ("operator", "where"),
        ("count", "time", "bytes", "GB/s", "of the roof"),
        ((each.operator, each.place, str(each.count), seconds_text(each.seconds), *_traffic(each, roof))
         for each in result.operators),
    )  # fmt: skip
    console.print(f"Main memory of this machine: {roof / 1e9:.1f} GB/s.")
    if result.counts:
        each = result.counts
        console.print(
            f"A token: {each['dispatches']:g} dispatches, {bytes_text(each['bytes_to_device'])} to the device, "
            f"{bytes_text(each['bytes_to_host'])} back, {bytes_text(each['word_bytes'])} of instructions."
        )


def _traffic(operator: OperatorTime, roof: float) -> tuple[str, str, str]:
    if not operator.bytes:
        return "", "", ""
    # The array's times are estimates for another machine, with another memory.
    share = "" if "estimate" in operator.place else f"{100 * operator.rate / roof:.0f} %"
    return bytes_text(operator.bytes), f"{operator.rate / 1e9:.1f}", share
