# SPDX-License-Identifier: Apache-2.0
"""`flownpu list`: the models that were pulled."""

from dataclasses import asdict

from flownpu.cli import options
from flownpu.cli.output import bytes_text, print_json, print_table, status
from flownpu.hub.store import stored_models


def list_models(as_json: options.AsJson = False) -> None:
    """List the models that `flownpu pull` made; `flownpu inspect NAME` shows one."""
    models = stored_models()
    if as_json:
        print_json({"models": [{**asdict(model), "folder": str(model.folder)} for model in models]})
        return
    if not models:
        status("No model was pulled yet: `flownpu pull NAME` does, with a name such as gemma3:1b or ORGANISATION/MODEL")
        return
    rows = [(model.name, ", ".join(model.short_names), model.source, bytes_text(model.size)) for model in models]
    print_table("models", ["name", "short names", "made of"], ["size"], rows, overflow="fold")
