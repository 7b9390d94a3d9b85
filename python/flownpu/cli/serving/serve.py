# SPDX-License-Identifier: Apache-2.0
"""`flownpu serve`: models over HTTP."""

import ipaddress
import logging
from pathlib import Path
from typing import Annotated

import typer

from flownpu.cli import options
from flownpu.cli.output import status
from flownpu.errors import require

KEY_VARIABLE = "FLOWNPU_API_KEY"
GIB = 2**30


def serve(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODEL]...",
            help="Folders that `flownpu convert` wrote, or names such as gemma3:1b, or NAME=MODEL. Without any: all "
            "that `flownpu list` shows.",
        ),
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; only this machine can reach the default.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")] = 8080,
    api_key: Annotated[
        str | None,
        typer.Option(
            metavar="KEY",
            envvar=KEY_VARIABLE,
            help="Key that clients must send. Other users of the machine cannot see it in the variable.",
        ),
    ] = None,
    open_to_all: Annotated[
        bool, typer.Option("--open-to-all", help="Listen on an address that others can reach, without a key.")
    ] = False,
    origin: Annotated[
        list[str] | None,
        typer.Option(metavar="URL", help="Web pages of this origin may use the server; may be repeated."),
    ] = None,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Requests may name this host, such as that of a container; may be repeated."),
    ] = None,
    alias: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=MODEL", help="Another name of a served model; * stands for every other name. May be repeated."
        ),
    ] = None,
    allow_pull: Annotated[
        bool, typer.Option("--allow-pull", help="Clients may pull and delete models by Ollama's API.")
    ] = False,
    context: options.Context = 4096,
    slots: options.Slots = 4,
    *,
    decoding: options.DecodingOptions,
    queue: Annotated[
        int, typer.Option(min=0, help="Requests that may wait for each model; further ones are refused.")
    ] = 64,
    max_output: Annotated[
        int | None, typer.Option(min=1, help="Most tokens of an answer, whatever is asked for.")
    ] = None,
    max_body: Annotated[int, typer.Option(min=1, metavar="MIB", help="Largest request.")] = 32,
    body_seconds: Annotated[float, typer.Option(min=0.1, help="Time in which a request must have arrived.")] = 30,
    max_images: Annotated[int, typer.Option(min=0, help="Most images in a conversation.")] = 16,
    request_seconds: Annotated[float, typer.Option(min=1, help="Most time for an answer, waiting included.")] = 600,
    heartbeat_seconds: Annotated[
        float, typer.Option(min=0.1, help="Most time in which a stream says nothing, however long its prompt takes.")
    ] = 10,
    stopping_seconds: Annotated[float, typer.Option(min=1, help="Time that answers have left after Ctrl-C.")] = 30,
    memory: Annotated[
        float | None,
        typer.Option(min=0.1, metavar="GIB", help="Memory of all models; the least recently used are dropped."),
    ] = None,
    log_texts: Annotated[bool, typer.Option("--log-texts", help="Log prompts and answers, too.")] = False,
    session: options.SessionOptions,
) -> None:
    """Serve models to the clients of OpenAI's API, Anthropic's and Ollama's, and to browsers: / is a chat page.

    The first model is loaded at once, others when they are first asked for. Ctrl-C lets running answers end.
    """
    settings = require("flownpu.serve.settings", extra="serve", purpose="flownpu serve")
    server = require("flownpu.serve.server", extra="serve", purpose="flownpu serve")
    if not _is_loopback(host) and api_key is None and not open_to_all:
        raise typer.BadParameter(
            f"others can reach {host}: expected --api-key, or {KEY_VARIABLE} in the environment; --open-to-all does "
            "without",
            param_hint="--host",
        )
    served = options.served_models(models or _stored(allow_pull=allow_pull), context, slots, session, decoding)
    pulled = options.model_settings(Path(), context, slots, session, decoding) if allow_pull else None
    logging.getLogger("flownpu.serve").setLevel(logging.INFO)
    logging.getLogger("uvicorn.access").setLevel(logging.INFO)
    server.serve(
        settings.ServerSettings(
            served,
            settings.Limits(
                body_bytes=max_body * 2**20,
                body_seconds=body_seconds,
                images=max_images,
                output_tokens=max_output,
                queue=queue,
                request_seconds=request_seconds,
                stopping_seconds=stopping_seconds,
            ),
            memory=None if memory is None else round(memory * GIB),
            api_key=api_key,
            origins=tuple(origin or ()),
            hosts=_hosts(allowed_host or [], is_open=not _is_loopback(host) or api_key is not None),
            aliases=dict(map(_alias, alias or [])),
            pulled=pulled,
            heartbeat_seconds=heartbeat_seconds,
            logs_texts=log_texts,
        ),
        host,
        port,
        status,
    )


def _stored(*, allow_pull: bool) -> list[str]:
    """The names of the models that were pulled, short ones where there are."""
    store = require("flownpu.hub.store", extra="convert", purpose="flownpu serve without MODEL")
    found = [(model.short_names or [model.name])[0] for model in store.stored_models()]
    if not found and not allow_pull:
        raise typer.BadParameter(
            "no model was pulled: expected folders or names, or --allow-pull, with which clients pull them",
            param_hint="MODEL",
        )
    return found


def _alias(text: str) -> tuple[str, str]:
    name, _, model = text.rpartition("=")
    if not name or not model:
        raise typer.BadParameter(f"expected NAME=MODEL, got {text!r}", param_hint="--alias")
    return name, model


def _hosts(allowed: list[str], *, is_open: bool) -> tuple[str, ...]:
    """The hosts that a request may name; all if others may reach the server and none is given.

    A web page can direct its own host name to this machine, and then calls the server by that name.
    """
    if is_open and not allowed:
        return ("*",)
    return ("localhost", "127.0.0.1", "::1", "[::1]", *allowed)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
