# SPDX-License-Identifier: Apache-2.0
"""`flownpu imagine`: a text becomes a picture."""

import io
import secrets
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn

from flownpu.aie.artifacts.folder import write_bytes
from flownpu.cli import options
from flownpu.cli.output import seconds_text, status
from flownpu.cli.progress import progress_bar
from flownpu.errors import FlowNPUError
from flownpu.imagine import ImageModel, PictureRequest, Scheduler
from flownpu.imagine.request import GUIDANCE, STEPS, read_size


def imagine(
    model: Annotated[
        Path, typer.Argument(metavar="PIPELINE", help="A pipeline of diffusers that `optimum-cli export onnx` wrote.")
    ],
    prompt: Annotated[str, typer.Option("--prompt", "-p", metavar="TEXT", help="What the picture shows.")],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE.png", help="Where the picture goes.")],
    negative: Annotated[str, typer.Option(metavar="TEXT", help="What the picture is not to show.")] = "",
    steps: Annotated[int, typer.Option(min=1, max=1000, help="More steps take longer, and often look better.")] = STEPS,
    guidance: Annotated[float, typer.Option(min=0, help="Weight of the prompt; 1 takes half the time.")] = GUIDANCE,
    seed: Annotated[
        int | None, typer.Option(min=0, max=2**63 - 1, help="The same seed gives the same picture. (default: random)")
    ] = None,
    size: Annotated[
        str | None,
        typer.Option(metavar="WIDTHxHEIGHT", help="Size in pixels. (default: the one that the model was trained with)"),
    ] = None,
    scheduler: Annotated[
        Scheduler | None, typer.Option(help="Which of diffusers' schedulers. (default: the model's own)")
    ] = None,
    *,
    session: options.SessionOptions,
) -> None:
    """Make a picture of a text with Stable Diffusion or another pipeline of diffusers.

    Pipeline and schedulers are diffusers' and optimum's. FlowNPU computes the networks, and leaves nodes that it does
    not take to ONNX Runtime. What ran where goes to stderr.
    """
    if output.suffix != ".png":
        raise typer.BadParameter(f"expected a name that ends with .png, got {output}", param_hint="--output")
    chosen = secrets.randbelow(2**31) if seed is None else seed
    pixels = None if size is None else read_size(size)
    request = PictureRequest(prompt, negative, steps, guidance, chosen, pixels, scheduler)
    opened = ImageModel(model, **session.settings())
    columns = (TextColumn("Steps"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    started, file = time.perf_counter(), io.BytesIO()
    with progress_bar(*columns) as bar:
        task = bar.add_task("steps", total=steps)
        picture = opened.picture(request, lambda done, total: bar.update(task, completed=done, total=total))
    picture.save(file, "PNG")
    try:
        write_bytes(output, file.getvalue())
    except OSError as error:
        raise FlowNPUError(f"{output}: cannot be written: {error.strerror}; --seed {chosen} makes it again") from error
    width, height = picture.size
    status(f"{output}: {width}x{height}, seed {chosen}, {seconds_text(time.perf_counter() - started)}")
    status(opened.placement)
