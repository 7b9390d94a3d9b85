# SPDX-License-Identifier: Apache-2.0
"""`flownpu make-model`: a model of random weights in a public model's shape, for benchmarks."""

from pathlib import Path
from typing import Annotated

import typer

from flownpu.cli import convert
from flownpu.cli.output import conversion_progress
from flownpu.errors import require
from flownpu.model.shapes import SHAPES


def make_model(
    shape: Annotated[str, typer.Argument(metavar="SHAPE", help=f"One of {', '.join(SHAPES)}.")],
    output: Annotated[Path | None, typer.Argument(metavar="OUT", help="Folder to make. (default: SHAPE)")] = None,
    random: Annotated[bool, typer.Option("--random", help="Random weights: the only ones that can be made.")] = False,
    kv_dtype: convert.KvDtypeOption = "bf16",
    sliding_window_cache: convert.WindowCache = False,
    paged: convert.PagedOption = False,
    context_length: Annotated[
        int | None, typer.Option("--context-length", min=1, help="Largest context. (default: the shape's, up to 40960)")
    ] = None,
    layers: Annotated[
        int | None,
        typer.Option("--layers", min=1, help="Only so many layers of a model that is too large. (default: all)"),
    ] = None,
    symmetric: Annotated[bool, typer.Option("--symmetric", help="Weights without minima, as Q4_0 has them.")] = False,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the random numbers.")] = 0,
    force: convert.Force = False,
) -> None:
    """Make a model of random weights in the exact shape of a public one, to measure with `flownpu bench`.

    It has the bytes and the work of the real model, and writes nonsense.
    """
    if shape not in SHAPES:
        raise typer.BadParameter(f"expected one of {', '.join(SHAPES)}, got {shape!r}", param_hint="SHAPE")
    if not random:
        raise typer.BadParameter("expected --random: a shape by itself has no trained weights", param_hint="--random")
    require("onnx_ir", extra="convert", purpose="flownpu make-model")
    from flownpu.convert.make_model import make_model as make  # noqa: PLC0415 needs the package just looked for

    folder = output or Path(shape)
    with conversion_progress() as report:
        make(
            shape,
            folder,
            kv_dtype=kv_dtype,
            sliding_window_cache=sliding_window_cache,
            paged=paged,
            context_length=context_length,
            layers=layers,
            symmetric=symmetric,
            seed=seed,
            force=force,
            progress=report,
        )
    convert.print_made(folder, f"flownpu {'serve' if paged else 'bench'} {folder}")
