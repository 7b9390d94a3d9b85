# SPDX-License-Identifier: Apache-2.0
"""`flownpu convert`: makes a model folder."""

from pathlib import Path
from typing import Annotated, Literal

import typer

import flownpu.convert
from flownpu.cli.output import bytes_text, conversion_progress, error_text, status
from flownpu.convert.output import check_output
from flownpu.errors import require
from flownpu.hub.store import find_source
from flownpu.model.folder import MANIFEST, is_embedding_folder, is_pipeline_folder, read_json

KvDtypeOption = Annotated[
    Literal["bf16", "fp16", "fp32", "int8"],
    typer.Option("--kv-dtype", help="Type of the KV cache; int8 has a scale for each head and token."),
]
LogitsOption = Annotated[
    Literal["last", "all"], typer.Option("--logits", help="Logits of the last token only, or of all tokens.")
]
WindowCache = Annotated[
    bool,
    typer.Option("--sliding-window-cache", help="In layers with a window, cache only the window's keys and values."),
]
PagedOption = Annotated[
    bool, typer.Option("--paged", help="For ORT GenAI's engine: many requests at a time, over one KV cache in blocks.")
]
ContextLength = Annotated[
    int | None, typer.Option("--context-length", min=1, help="Largest context. (default: the model's)")
]
Output = Annotated[Path, typer.Argument(metavar="OUT", help="Folder to make.")]
Force = Annotated[bool, typer.Option("--force", help="Replace a model that is there.")]


def convert(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="SRC",
            help="A Hugging Face checkpoint folder, a GGUF file, an ORT GenAI model folder, an optimum export, or a "
            "name such as gemma3:1b.",
        ),
    ],
    output: Output,
    kv_dtype: KvDtypeOption = "bf16",
    logits: LogitsOption = "last",
    sliding_window_cache: WindowCache = False,
    paged: PagedOption = False,
    weights: Annotated[
        str,
        typer.Option(
            "--weights",
            metavar="auto|q4|q8|8/4/4|4.75",
            help="Bits: 4; 8; those of attention, embedding and feed-forward; or an average, for which the floats that "
            "gain most get 8 and the others 4. auto: the source's, for floats 4. A pipeline of diffusers: bf16 or q8.",
        ),
    ] = "auto",
    context_length: ContextLength = None,
    vision_weights: Annotated[
        Literal["bf16", "int8", "q4nx", "none"] | None,
        typer.Option(
            "--vision-weights",
            help="Type of the vision tower's matrices; none: the text decoder alone. (default: bf16, if there is one)",
        ),
    ] = None,
    encoder_weights: Annotated[
        Literal["bf16", "int8", "q4nx"] | None,
        typer.Option("--encoder-weights", help="Type of a text encoder's matrices. (default: bf16)"),
    ] = None,
    force: Force = False,
) -> None:
    """Convert a checkpoint, a GGUF file, a GenAI model or an optimum export into a folder that runs on FlowNPU.

    Weights become Q4NX: 4 or 8 bits, and a scale and a minimum for each 32. Codes of quantised checkpoints and GGUF
    files are kept where Q4NX has the same form; the command reports which weights were quantised again. The folder
    appears when it is complete.
    """
    require("onnx_ir", extra="convert", purpose="flownpu convert")
    check_output(output, force=force)  # before a download
    with conversion_progress() as report:
        found = find_source(source, output, report)
        flownpu.convert.convert(
            found.path,
            output,
            name=found.name,
            kv_dtype=kv_dtype,
            logits=logits,
            sliding_window_cache=sliding_window_cache,
            paged=paged,
            weights=weights,
            context_length=context_length,
            vision_weights=vision_weights,
            encoder_weights=encoder_weights,
            force=force,
            progress=report,
        )
    vision = read_json(output / MANIFEST).get("quantisation", {}).get("vision")
    if vision:
        status(
            error_text(
                f"Quantisation error of the vision tower's weights, {vision['format']}", vision["relative_error"]
            )
        )
    print_made(output, f"flownpu serve {output}" if paged else next_command(output, str(output)))


def next_command(folder: Path, name: str) -> str:
    """The command that uses a converted model; an optimum export runs in optimum only."""
    if (folder / "genai_config.json").is_file():
        return f'flownpu run {name} -p "some text"'
    if is_pipeline_folder(folder):
        return f'flownpu imagine {name} -p "some text" -o picture.png'
    return f'flownpu embed {name} "some text"' if is_embedding_folder(folder) else f"flownpu explain {name}"


def print_made(output: Path, command: str) -> None:
    """Prints the converted model, and a command that uses it."""
    size = sum(path.stat().st_size for path in output.rglob("*") if path.is_file())
    status(f"{output}: {bytes_text(size)}. Next: {command}")
