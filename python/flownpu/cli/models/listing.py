# SPDX-License-Identifier: Apache-2.0
"""`flownpu list`: the models that were pulled."""

from dataclasses import asdict

from flownpu.cli import options
from flownpu.cli.output import bytes_text, print_json, print_table, status
from flownpu.hub.store import stored_models, unfinished_pulls


def list_models(as_json: options.AsJson = False) -> None:
    """List the models that `flownpu pull` made; `flownpu inspect NAME` shows one."""
    models, unfinished = stored_models(), unfinished_pulls()
    if as_json:
        listed = [{**asdict(model), "folder": str(model.folder)} for model in models]
        print_json({"models": listed, "unfinished": unfinished})
        return
    for name in unfinished:
        status(f"{name} is not complete: `flownpu pull {name}` completes it, and keeps the files that are there")
    if not models:
        if unfinished:
            return
        status("No model was pulled yet: `flownpu pull NAME` does, with a name such as gemma3:1b or ORGANISATION/MODEL")
        return
    rows = [(model.name, ", ".join(model.short_names), model.source, bytes_text(model.size)) for model in models]
    print_table("models", ["name", "short names", "made of"], ["size"], rows, overflow="fold")
