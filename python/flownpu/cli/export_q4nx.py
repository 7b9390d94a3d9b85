# SPDX-License-Identifier: Apache-2.0
"""`flownpu export-q4nx`: writes a model's weights as a .q4nx file."""

from pathlib import Path
from typing import Annotated

import typer

from flownpu.cli.options import ModelFolder
from flownpu.cli.output import bytes_text, conversion_progress, status
from flownpu.errors import require


def export_q4nx(
    model: ModelFolder,
    output: Annotated[Path, typer.Argument(metavar="OUT.q4nx", help="File to write.")],
    force: Annotated[bool, typer.Option("--force", help="Replace a file that is there.")] = False,
) -> None:
    """Write a converted model's weights as a .q4nx file, as FastFlowLM's converter lays it out.

    Gemma 3, Llama and Qwen 3 that `flownpu convert` made of a checkpoint or a GGUF file.
    """
    require("onnx_ir", extra="convert", purpose="flownpu export-q4nx")
    import flownpu.convert.export_q4nx as conversion  # noqa: PLC0415 needs the package just looked for

    with conversion_progress() as report:
        conversion.export_q4nx(model, output, force=force, progress=report)
    status(f"{output}: {bytes_text(output.stat().st_size)}")
