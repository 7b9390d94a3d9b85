# SPDX-License-Identifier: Apache-2.0
"""`flownpu verify`: whether a model computes what its source does, and which layer does not."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import TextColumn, TimeElapsedColumn

from flownpu.cli import options
from flownpu.cli.output import console, print_json, print_table
from flownpu.cli.progress import progress_bar
from flownpu.errors import FlowNPUError, require

if TYPE_CHECKING:
    from flownpu.verify.comparison import Int8Cost, Stage, Verification


def verify(
    model: options.ModelFolder,
    against: Annotated[
        Path,
        typer.Option(
            "--against",
            metavar="SRC",
            callback=options.named_source,
            help="A Hugging Face checkpoint, as a folder or by its name, or a model folder with 4-bit weights.",
        ),
    ],
    text: Annotated[str | None, typer.Option("--text", help="Text to run both on. (default: a paragraph)")] = None,
    file: Annotated[Path | None, typer.Option("--file", metavar="FILE", help="File with that text.")] = None,
    tokens: Annotated[int, typer.Option("--tokens", min=2, help="Most tokens of the text to use.")] = 256,
    provider: options.ProviderOption = "flownpu",
    device: options.DeviceOption = None,
    activations: options.ActivationsOption = "bf16",
    option: options.Option = None,
    as_json: options.AsJson = False,
) -> None:
    """Compare a model with its source on the same tokens; fails if a layer computes something else.

    Shows the Kullback-Leibler divergence of the next tokens, how often both find the same likeliest token, the
    perplexities, and each layer's relative error beside its tolerance, which is derived from the arithmetic. It
    compares with bf16 activations, and shows what int8 activations, the default of other commands, cost.
    """
    if text is not None and file is not None:
        raise typer.BadParameter("give the text with --text or with --file, not both", param_hint="--file")
    require("onnx_ir", extra="convert", purpose="flownpu verify")
    from flownpu.verify.comparison import PARAGRAPH  # noqa: PLC0415 other commands need none of it
    from flownpu.verify.comparison import verify as verify_model  # noqa: PLC0415

    chosen = options.provider_options(device, activations, option)
    if provider == "cpu" and (device is not None or option):
        raise FlowNPUError("--device and --option are for FlowNPU's provider, given with --provider cpu; leave one out")
    words = file.read_text(encoding="utf-8") if file is not None else text if text is not None else PARAGRAPH
    with progress_bar(TextColumn("{task.description}"), TimeElapsedColumn()) as bar:
        task = bar.add_task("reading")
        found = verify_model(
            model,
            against,
            words,
            chosen if provider == "flownpu" else None,
            most_tokens=tokens,
            report=lambda doing: bar.update(task, description=doing),
        )
    first = found.first_divergence
    if as_json:
        stages = [{**asdict(stage), "diverges": stage.diverges} for stage in found.stages]
        int8 = found.int8 and {**asdict(found.int8), "is_large": found.int8.is_large}
        rest = {"stages": stages, "first_divergence": first.name if first else None, "int8": int8}
        print_json({**asdict(found), **rest})
    else:
        _print(found, first)
    if first is not None:
        raise typer.Exit(1)


def _print(found: "Verification", first: "Stage | None") -> None:
    console.print(f"{found.model} against {found.source}: {found.tokens} tokens")
    console.print(
        f"KL divergence {found.kl_mean:.2e} nats a token (largest {found.kl_largest:.2e}); same likeliest token after "
        f"{100 * found.top1_agreement:.1f} %; perplexity {found.model_perplexity:.3f}, source's "
        f"{found.source_perplexity:.3f}"
    )
    numbers = ("own", "tolerance", "= weights", "+ roundings", "", "Q4NX", "whole run")
    print_table("relative errors, %", ["stage"], numbers, map(_row, found.stages))
    console.print(
        "Own: each stage starts from the source's hidden states. Q4NX: what rounding its weights does to the source's "
        f"stage. Tolerance: {found.basis}."
    )
    if found.int8 is not None:
        _print_int8(found.int8)
    if first is None:
        console.print("Every stage is within its tolerance.")
    else:
        console.print(
            f"{first.name} diverges first: its error is {100 * first.error:.2f} %, its tolerance "
            f"{100 * first.tolerance:.2f} %"
        )
        if all(stage.diverges for stage in found.stages):
            console.print(
                "Every stage diverges: the two are not one model, or were quantised apart; take their checkpoint"
            )


def _row(stage: "Stage") -> tuple[str, ...]:
    numbers = (stage.error, stage.tolerance, stage.from_weights, stage.from_roundings)
    return (
        stage.name,
        *(f"{100 * number:.2f}" for number in numbers),
        "diverges" if stage.diverges else "ok",
        "" if stage.quantisation is None else f"{100 * stage.quantisation:.2f}",
        f"{100 * stage.accumulated:.2f}",
    )


def _print_int8(cost: "Int8Cost") -> None:
    weights = "" if cost.weights_kl_mean is None else f"; its 4-bit weights, {cost.weights_kl_mean:.2e}"
    console.print(
        f"int8 activations: KL divergence {cost.kl_mean:.2e} from those in bf16, same likeliest token after "
        f"{100 * cost.top1_agreement:.1f} %{weights}."
    )
    if cost.is_large:
        console.print("Run it with --activations bf16: int8 costs this model more than 4-bit weights do.")
