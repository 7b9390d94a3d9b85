# SPDX-License-Identifier: Apache-2.0
"""`flownpu pull`: downloads a model by its name and converts it."""

from typing import Annotated

import typer

from flownpu.cli.convert import next_command, print_made
from flownpu.cli.output import conversion_progress, status
from flownpu.errors import require
from flownpu.hub.reference import expect
from flownpu.hub.short_names import SHORT_NAMES
from flownpu.hub.store import pull as pull_model


def pull(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="Repository of Hugging Face's hub as ORGANISATION/MODEL@REVISION:GGUF, the last two of which may be "
            f"left out, or a short name: {', '.join(SHORT_NAMES)}.",
        ),
    ],
) -> None:
    """Download a model and convert it, into ~/.cache/flownpu/models. Other commands take the name for a folder.

    They pull a model that is not there; `pull` also renews one that the hub has changed. @REVISION is a branch, a tag
    or a commit; :GGUF a type such as Q4_K_M, or a file's name. Only files that the conversion reads are downloaded, by
    huggingface_hub with its cache, tokens and variables (HF_TOKEN, HF_ENDPOINT, HF_HOME, HF_HUB_OFFLINE).
    """
    require("onnx_ir", extra="convert", purpose="flownpu pull")
    reference = expect(name)
    with conversion_progress() as report:
        folder = pull_model(reference, report, status)
    print_made(folder, next_command(folder, name))
