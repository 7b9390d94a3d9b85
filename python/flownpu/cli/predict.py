# SPDX-License-Identifier: Apache-2.0
"""`flownpu predict`: a model's predicted speed on an NPU, beside others' published numbers, or on a GPU."""

import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich import box
from rich.table import Table

from flownpu.cli import options
from flownpu.cli.output import console, print_json, waiting
from flownpu.model.folder import read_genai_config

if TYPE_CHECKING:
    from flownpu.aie.cost.chips import Chip
    from flownpu.aie.cost.parameters import Values
    from flownpu.convert.weight_bits import WeightBits
    from flownpu.predict.pair import PairReport
    from flownpu.predict.report import PredictionReport

_LENGTH = re.compile(r"(\d+)(k?)", re.IGNORECASE)


def predict(
    model: Annotated[
        str,
        typer.Argument(
            metavar="TARGET",
            help="A model's folder (converted, of GenAI, or a checkpoint), its config.json, or a name such as "
            "gemma3-4b or stable-diffusion-1.4.",
        ),
    ],
    device: Annotated[
        str,
        typer.Option(
            "--device",
            metavar="CHIP",
            help="The chip, kraken-350 or kraken-340; or a GPU, radeon-780m or radeon-890m (`gpu`: both); or one for "
            "prompts and one for tokens: kraken-350+radeon-890m.",
        ),
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
    measured: Annotated[
        Path | None,
        typer.Option(
            "--measured",
            metavar="FILE",
            help="Parameters measured on silicon, as JSON, in place of published ones.",
        ),
    ] = None,
    kv_dtype: Annotated[
        Literal["bf16", "int8"],
        typer.Option("--kv-dtype", help="Type of the KV cache on the NPU, of a model that is not converted yet."),
    ] = "bf16",
    weights: Annotated[
        str | None,
        typer.Option(
            "--weights",
            metavar="q4|q8|8/4/4",
            help="Bits of the weights, as `convert` has them, of a model that is not converted yet. (default: q4)",
        ),
    ] = None,
    write: Annotated[
        bool,
        typer.Option(
            "--write",
            help="Keep the prices of two devices in the folder's genai_config.json, by which sessions choose.",
        ),
    ] = False,
    as_json: options.AsJson = False,
) -> None:
    """Predict a model's speed, memory traffic and energy on an NPU, beside what was published; or its speed on a GPU.

    Nothing is run: the programs that `flownpu build` would write are priced by the cost model, whose errors
    docs/model.md lists row by row. For a GPU it is the bound of its memory and its arithmetic.
    """
    if write and ("+" not in device or not (Path(model) / "genai_config.json").is_file()):
        raise typer.BadParameter("expected a folder with genai_config.json, and two devices", param_hint="--write")
    if "+" in device:
        if kv_dtype == "int8" or measured is not None:
            raise typer.BadParameter("expected no --kv-dtype int8 and no --measured with two devices")
        pair = _predict_pair(model, device, parse_contexts(context) if context else [], weights, as_json=as_json)
        if write:
            _write_prices(Path(model), pair)
        return
    from flownpu.predict import pictures  # noqa: PLC0415 other commands need none of it

    if device == "gpu" or device.startswith("radeon"):
        if kv_dtype == "int8":
            raise typer.BadParameter("expected no --kv-dtype int8 with a GPU, which has no such cache")
        if model == pictures.NAME:
            if context or weights or measured:
                raise typer.BadParameter("expected no --context, --weights or --measured for pictures on a GPU")
            _predict_picture_on_gpus(device, as_json=as_json)
            return
        _predict_gpus(model, device, parse_contexts(context) if context else [], measured, weights, as_json=as_json)
        return
    from flownpu.aie.cost.chips import CHIPS  # noqa: PLC0415 other commands need none of it
    from flownpu.aie.cost.parameters import VALUES  # noqa: PLC0415
    from flownpu.predict.measured_parameters import measured_values  # noqa: PLC0415
    from flownpu.predict.report import predict as predict_model  # noqa: PLC0415
    from flownpu.predict.target import nearest, target  # noqa: PLC0415

    if device not in CHIPS:
        raise typer.BadParameter(f"no such chip: {device}{nearest(device, CHIPS)}", param_hint="--device")
    if model == pictures.NAME:
        if context or weights or kv_dtype == "int8":
            raise typer.BadParameter("expected no --context, --weights or --kv-dtype for pictures")
        values = measured_values(measured) if measured else VALUES
        _predict_picture(CHIPS[device], values, as_json=as_json)
        return
    contexts = parse_contexts(context) if context else ()
    values = measured_values(measured) if measured else VALUES
    with waiting("pricing the programs ..."):
        found = target(model, int8_cache=kv_dtype == "int8", bits=_bits(weights))
        report = predict_model(found, CHIPS[device], contexts, values)
    if as_json:
        print_json(_document(report, {name: values[name] for name in values if values[name] != VALUES[name]}))
        return
    _print(report, CHIPS[device].description, "published" if measured is None else f"those of {measured}")


def _predict_picture(chip: "Chip", values: "Values", *, as_json: bool) -> None:
    from flownpu.predict import pictures  # noqa: PLC0415 other commands need none of it

    with waiting("pricing the programs ..."):
        found = pictures.predict_picture(chip, values)
    if as_json:
        print_json({"predicted": True, "picture_seconds": found.picture, **asdict(found)})
        return
    console.print(f"A picture of 512 x 512 by {pictures.NAME} on {chip.description}", markup=False)
    console.print("Predicted, not measured: programs priced step by step, the host by its bytes.", markup=False)
    for name, rows in found.networks.items():
        title = (
            f"{name}{f', of {pictures.STEPS}, with guidance' if name == 'step' else ''}: {found.seconds(name):.2f} s"
        )
        table = _table(title, "", "nodes", "on the array", "GMAC", "ms", "array alone, ms")
        for kind, row in rows.items():
            cells = [str(row.nodes), str(row.on_array), f"{row.multiply_adds / 1e9:.1f}"] if row.nodes else [""] * 3
            table.add_row(kind, *cells, f"{row.seconds * 1e3:.0f}", f"{row.alone * 1e3:.0f}" if row.alone else "")
        console.print(table)
    console.print(f"The picture: {found.picture:.1f} s", markup=False)
    _print_published_pictures()


def _print_published_pictures() -> None:
    from flownpu.predict import pictures  # noqa: PLC0415 other commands need none of it

    others = ", ".join(f"{name} {seconds} s" for name, seconds in pictures.PUBLISHED.items())
    console.print(f"GPUs in fp16, published by ML Drift: {others}", markup=False)


def _predict_picture_on_gpus(device: str, *, as_json: bool) -> None:
    from flownpu.predict import pictures  # noqa: PLC0415 other commands need none of it
    from flownpu.predict.gpu import GPUS  # noqa: PLC0415

    found = {
        name: {
            way: pictures.predict_picture_on_gpu(GPUS[name], winograd=way == "winograd")
            for way in ("windows", "winograd")
        }
        for name in _gpus(device)
    }
    if as_json:
        print_json({"predicted": True, "devices": found})
        return
    console.print(f"A picture of 512 x 512 and {pictures.STEPS} steps by {pictures.NAME} in float32", markup=False)
    console.print(
        "Predicted, not measured: as fast as memory and arithmetic permit at most (docs/model.md).", markup=False
    )
    for name, ways in found.items():
        table = _table(
            GPUS[name].description, "seconds at least", "a step, with guidance", "decoder", "text", "picture"
        )
        for way, seconds in ways.items():
            title = "3 x 3 convolutions by Winograd's transforms" if way == "winograd" else "as products of windows"
            table.add_row(title, *(f"{seconds[part]:.2f}" for part in ("step", "decoder", "text", "picture")))
        console.print(table)
    _print_published_pictures()


def _gpus(device: str) -> list[str]:
    """The GPUs that --device names."""
    from flownpu.predict.gpu import GPUS  # noqa: PLC0415 other commands need none of it
    from flownpu.predict.target import nearest  # noqa: PLC0415

    if device != "gpu" and device not in GPUS:
        raise typer.BadParameter(f"no such GPU: {device}{nearest(device, GPUS)}", param_hint="--device")
    return [name for name in GPUS if device in ("gpu", name)]


def _bits(weights: str | None) -> "WeightBits | None":
    from flownpu.convert.average_bits import AverageBits, parse_weight_bits  # noqa: PLC0415

    bits = parse_weight_bits(weights) if weights else None
    if isinstance(bits, AverageBits):
        raise typer.BadParameter("expected bits of each part, such as 8/4/4, got an average, which conversion measures")
    return bits


def _predict_gpus(
    model: str, device: str, contexts: list[int], measured: Path | None, weights: str | None, *, as_json: bool
) -> None:
    from flownpu.predict.gpu import GPUS, predict_gpu  # noqa: PLC0415 other commands need none of it
    from flownpu.predict.target import target  # noqa: PLC0415

    names = _gpus(device)
    if measured is not None:
        raise typer.BadParameter("expected no --measured with a GPU: it is the NPU's")
    found = target(model, bits=_bits(weights))
    points = {name: predict_gpu(found, GPUS[name], contexts) for name in names}
    if as_json:
        print_json(
            {
                "predicted": True,
                "model": found.name,
                "devices": {name: [asdict(point) for point in of_gpu] for name, of_gpu in points.items()},
            }
        )
        return
    for name, of_gpu in points.items():
        console.print(f"{found.name} on {GPUS[name].description}", markup=False)
        console.print(
            "Predicted, not measured: as fast as memory and arithmetic permit at most (docs/model.md).",
            markup=False,
        )
        table = _table("", "context", "first token, s", "prompt, tok/s", "decode, tok/s", "memory's roof", "GB a token")
        for point in of_gpu:
            table.add_row(
                _length(point.context),
                f"{point.ttft_seconds:.2f}",
                f"{point.prefill_tokens_per_second:.0f}",
                f"{point.decode_tokens_per_second:.1f}",
                f"{point.roof:.1f}",
                f"{point.read_bytes / 1e9:.2f}",
            )
        console.print(table)


def _write_prices(folder: Path, report: "PairReport") -> None:
    """Under the names by which sessions know the devices."""
    from flownpu.bench.tuning import write_prices  # noqa: PLC0415 other commands need none of it
    from flownpu.predict.gpu import GPUS  # noqa: PLC0415

    named = [
        replace(
            table,
            devices=tuple(replace(each, device="gpu" if each.device in GPUS else "npu") for each in table.devices),
        )
        for table in report.prices
    ]
    write_prices(folder, read_genai_config(folder), named, "speed")


def _predict_pair(model: str, device: str, contexts: list[int], weights: str | None, *, as_json: bool) -> "PairReport":
    from flownpu.predict.pair import DEVICES, predict_pair  # noqa: PLC0415 other commands need none of it
    from flownpu.predict.target import nearest, target  # noqa: PLC0415

    names = device.split("+")
    for name in names:
        if name not in DEVICES:
            raise typer.BadParameter(f"no such chip or GPU: {name}{nearest(name, DEVICES)}", param_hint="--device")
    if len(set(names)) != len(names) or len(names) != 2:
        raise typer.BadParameter(f"expected two different devices, got {device}", param_hint="--device")
    with waiting("pricing the programs ..."):
        report = predict_pair(target(model, bits=_bits(weights)), device, contexts)
    if as_json:
        print_json({"predicted": True, **asdict(report)})
        return report
    console.print(f"{report.model}: prompts on {names[0]}, tokens on {names[1]}", markup=False)
    console.print("Predicted, not measured; a GPU's numbers are bounds (docs/model.md).", markup=False)
    table = _table("", "context", "first token, s", "decode, tok/s", "handed over, MB", "in, ms", "J/prompt", "J/token")
    for point in report.points:
        table.add_row(
            _length(point.context),
            f"{point.ttft_seconds:.2f}",
            f"{point.decode_tokens_per_second:.1f}",
            f"{point.handed_over_bytes / 1e6:.1f}",
            f"{point.handed_over_seconds * 1e3:.1f}",
            "" if point.prompt_joules is None else f"{point.prompt_joules:.2f}",
            "" if point.token_joules is None else f"{point.token_joules:.3f}",
        )
    console.print(table)
    console.print("A prompt of the first length and 128 tokens:", markup=False)
    for what, choice, unit in (("fastest", report.speed, "s"), ("least energy", report.energy, "J")):
        if choice is None:
            console.print("  least energy: no source gives the watts of both devices for this model", markup=False)
            continue
        others = "; ".join(f"{name} {cost:.3g} {unit}" for name, cost in choice.costs.items())
        threshold = "" if choice.threshold is None else f", prompt_threshold={choice.threshold}"
        console.print(f"  {what}: {choice.device}{threshold} ({others})", markup=False)
    return report


def _print(report: "PredictionReport", chip: str, source: str) -> None:
    from flownpu.predict.published import TABLES  # noqa: PLC0415 other commands need none of it

    console.print(f"{report.model} on {chip}", markup=False)
    console.print(
        f"Predicted, not measured: the programs of `flownpu build`, priced step by step; parameters: {source}.",
        markup=False,
    )
    letters = {table.name: chr(ord("a") + place) for place, table in enumerate(report.tables)}
    console.print(_prompts(report, letters))
    console.print(_decoding(report, letters))
    for name, letter in letters.items():
        table = TABLES[name]
        console.print(f"{letter}: {table.label}; {table.source}; read {table.read}", markup=False)
    if report.errors:
        errors = " and ".join(f"{error:.0%} ({quantity})" for quantity, error in report.errors.items())
        console.print(
            f"Ranges: the cost model's mean error on published tables that its parameters were not fitted to, "
            f"{errors}. Of the array's own kernels none was ever timed.",
            markup=False,
        )
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


def _prompts(report: "PredictionReport", letters: dict[str, str]) -> Table:
    table = _table("a prompt", "tokens", "first token, s", "range", "tok/s", "changes", "published, s")
    for point in report.points:
        table.add_row(
            _length(point.context),
            f"{point.ttft_seconds:.2f}",
            _range(point.ttft_seconds, report.errors.get("ttft"), ".2f"),
            f"{point.prefill_tokens_per_second:.0f}",
            str(point.ttft_changes),
            _others(point.published["ttft"], letters, ".2f"),
        )
    return table


def _decoding(report: "PredictionReport", letters: dict[str, str]) -> Table:
    headings = "decoding", "context", "tok/s", "range", "GB/s", "of the roof", "J/token", "published, tok/s"
    table = _table(*headings)
    for point in report.points:
        table.add_row(
            _length(point.context),
            f"{point.decode_tokens_per_second:.1f}",
            _range(point.decode_tokens_per_second, report.errors.get("decode"), ".1f"),
            f"{point.read_bytes_per_second / 1e9:.1f}",
            f"{point.roof_share:.0%}",
            "" if point.decode_joules is None else f"{point.decode_joules:.3f}",
            _others(point.published["decode"], letters, ".1f"),
        )
    return table


def _table(title: str, *headings: str) -> Table:
    """A table that fits 80 columns: headings wrap, cells do not."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in headings:
        table.add_column(heading, justify="right")
    return table


def _range(value: float, error: float | None, style: str) -> str:
    """The range of the value if the model errs as it does on average."""
    return "" if error is None else f"{value * (1 - error):{style}}-{value * (1 + error):{style}}"


def _length(tokens: int) -> str:
    return f"{tokens // 1024}k" if tokens % 1024 == 0 else str(tokens)


def _others(published: dict[str, float], letters: dict[str, str], style: str) -> str:
    """Each source with the letter of its table."""
    return ", ".join(f"{value:{style}} {letters[name]}" for name, value in published.items())


def _document(report: "PredictionReport", measured: dict[str, float]) -> dict[str, Any]:
    document = asdict(report)
    for point, of_point in zip(report.points, document["points"], strict=True):
        of_point["prefill_tokens_per_second"] = point.prefill_tokens_per_second
        of_point["roof_share"] = point.roof_share
    tables = {
        table.name: {"label": table.label, "source": table.source, "read": table.read, "role": table.role.value}
        for table in report.tables
    }
    return {"predicted": True, **document, "tables": tables, "measured": measured}
