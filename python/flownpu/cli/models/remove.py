# SPDX-License-Identifier: Apache-2.0
"""`flownpu remove`: removes a model that was pulled."""

from flownpu.cli.models.pull import Name
from flownpu.cli.output import status
from flownpu.hub import store
from flownpu.hub.reference import expect


def remove(name: Name) -> None:
    """Remove a model that `flownpu pull` made. The download stays in huggingface_hub's cache."""
    reference = expect(name)
    store.remove(reference)
    status(f"{name} is removed; `hf cache rm model/{reference.repository}` removes its download")
