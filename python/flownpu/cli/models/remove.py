# SPDX-License-Identifier: Apache-2.0
"""`flownpu remove`: removes a model that was pulled."""

from typing import Annotated

import typer

from flownpu.cli.output import status
from flownpu.hub import store
from flownpu.hub.reference import expect


def remove(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The model, as `flownpu list` shows it.")],
) -> None:
    """Remove a model that `flownpu pull` made. The download stays in huggingface_hub's cache."""
    reference = expect(name)
    store.remove(reference)
    status(f"{name} is removed; `hf cache rm model/{reference.repository}` removes its download")
