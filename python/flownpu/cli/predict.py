# SPDX-License-Identifier: Apache-2.0
"""`flownpu predict`: what a model is predicted to do on an NPU, beside what others published."""

import re
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from flownpu.cli import options
from flownpu.cli.output import console, print_json, status

if TYPE_CHECKING:
    from flownpu.prediction_report import Point, Report

_LENGTH = re.compile(r"(\d+)(k?)", re.IGNORECASE)


def predict(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A model's name, such as gemma3-4b.")],
    device: Annotated[
        str, typer.Option("--device", metavar="CHIP", help="The chip: kraken-350 or kraken-340.")
    ] = "kraken-350",
    context: Annotated[
        str | None,
        typer.Option(
            "--context",
            metavar="LENGTHS",
            help="Lengths such as 1k,2k,4096; `...` doubles up to the next: 1k,...,128k. "
            "(default: 1k,... as far as the model goes)",
        ),
    ] = None,
    design: Annotated[
        str,
        typer.Option("--design", metavar="NAME", help="How it is laid on the array: flownpu, split or published."),
    ] = "flownpu",
    as_json: options.AsJson = False,
    plot: Annotated[
        Path | None,
        typer.Option("--plot", metavar="DIR", help="Write decode.svg and ttft.svg into this folder; needs Matplotlib."),
    ] = None,
) -> None:
    """Predict a model's speed, memory traffic and energy on an NPU, beside what was published.

    Nothing is run: the numbers come from the cost model, whose errors docs/model.md lists row by row.
    """
    from flownpu.aie.cost.device import DEVICES  # noqa: PLC0415 other commands need none of it
    from flownpu.prediction_designs import DESIGNS  # noqa: PLC0415
    from flownpu.prediction_report import predict as predict_model  # noqa: PLC0415

    for name, value, known in (("--device", device, DEVICES), ("--design", design, DESIGNS)):
        if value not in known:
            raise typer.BadParameter(f"expected one of {', '.join(known)}, got {value!r}", param_hint=name)
    report = predict_model(model, DEVICES[device], DESIGNS[design], parse_contexts(context) if context else ())
    if plot is not None:
        plot.mkdir(parents=True, exist_ok=True)
        for name, drawing in report.plots().items():
            (plot / f"{name}.svg").write_text(drawing, encoding="utf-8")
            status(f"wrote {plot / name}.svg")
    if as_json:
        print_json(_document(report, DESIGNS[design].description))
        return
    console.print(f"{model} on {DEVICES[device].description}", markup=False)
    console.print(f"Predicted, not measured, for {design}: {DESIGNS[design].description}.", markup=False)
    console.print(_table(report))
    if report.vision_ttft_seconds is not None:
        console.print(f"An image and a short question: first token after {report.vision_ttft_seconds:.2f} s")


def parse_contexts(text: str) -> list[int]:
    """Lengths "1k,2k,...,128k" in tokens.

    Raises:
        typer.BadParameter: a length is neither a number nor one with a k, or `...` does not stand between two.
    """
    lengths: list[int] = []
    doubling = False
    for part in text.split(","):
        if part.strip() in {"...", "…"} and lengths and not doubling:
            doubling = True
            continue
        match = _LENGTH.fullmatch(part.strip())
        if not match or int(match[1]) == 0:
            raise typer.BadParameter(f"expected lengths such as 1k,2k,...,32k, got {text!r}", param_hint="--context")
        length = int(match[1]) * (1024 if match[2] else 1)
        while doubling and lengths[-1] * 2 < length:
            lengths.append(lengths[-1] * 2)
        doubling = False
        lengths.append(length)
    if doubling:
        raise typer.BadParameter(f"expected a length after `...`, got {text!r}", param_hint="--context")
    return lengths


def _table(report: "Report") -> Table:
    table = Table(title="predicted", title_justify="left")
    headings = ["context", "TTFT s", "published s", "decode tok/s", "published tok/s", "GB/s", "of the roof", "J/token"]
    for heading in headings:
        table.add_column(heading, justify="right")
    for point in report.points:
        table.add_row(
            _length(point.context),
            f"{point.ttft_seconds:.2f}",
            _others(point, "ttft", ".2f"),
            f"{point.decode_tokens_per_second:.1f}",
            _others(point, "decode", ".1f"),
            f"{point.read_bytes_per_second / 1e9:.1f}",
            f"{point.roof_share:.0%}",
            "" if point.decode_joules is None else f"{point.decode_joules:.3f}",
        )
    return table


def _length(tokens: int) -> str:
    return f"{tokens // 1024}k" if tokens % 1024 == 0 else str(tokens)


def _others(point: "Point", quantity: str, style: str) -> str:
    return ", ".join(f"{value:{style}}" for value in point.published[quantity].values())


def _document(report: "Report", description: str) -> dict[str, Any]:
    document = asdict(report)
    for point, of_point in zip(report.points, document["points"], strict=True):
        of_point["prefill_tokens_per_second"] = point.prefill_tokens_per_second
        of_point["roof_share"] = point.roof_share
    return {"predicted": True, "description": description, **document}
