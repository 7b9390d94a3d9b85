# SPDX-License-Identifier: Apache-2.0
"""The settings with which a server starts."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from flownpu.errors import FlowNPUError
from flownpu.serve.processes.protocol import ModelSettings

ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://(\[[0-9a-f:.]+\]|[a-z0-9_.-]+)(:\d+)?/?", re.ASCII | re.IGNORECASE)
"""Scheme, host and port; a slash behind them is what the address bar of a browser shows."""


@dataclass(frozen=True)
class Limits:
    """Bounds on the memory, time and number of requests."""

    body_bytes: int = 32 * 2**20
    """A request's body: a few photographs as base64, or the text of some books."""
    body_seconds: float = 30.0
    """Time within which a connection's first headers must arrive, and each body."""
    images: int = 16
    """Images in one conversation."""
    choices: int = 16
    """Answers to one request: `n` times the number of prompts."""
    output_tokens: int | None = None
    """Most tokens of one answer, whatever a request asks for; None: what the context holds."""
    queue: int = 64
    """Answers that may wait for one model, beyond those that it computes."""
    request_seconds: float = 600.0
    """From the end of a request to the end of its answer, waiting included."""
    stopping_seconds: float = 30.0
    """How long requests may still run after the server receives the signal to end."""


@dataclass(frozen=True)
class ServerSettings:
    """Models and who may use them.

    Raises:
        FlowNPUError: the key is one that no header can carry, an origin is none, or an alias is of no model.
    """

    models: Mapping[str, ModelSettings]
    """How each model is opened, by the name that clients know it by."""
    limits: Limits = field(default_factory=Limits)
    memory: int | None = None
    """Resident bytes that all models' processes together may have; None: no limit."""
    api_key: str | None = None
    """The key that clients must show; None: they need none."""
    origins: tuple[str, ...] = ()
    """Other origins whose web pages may use the server, such as "https://chat.example"; "*": all."""
    hosts: tuple[str, ...] = ("*",)
    """Host names that a request's `Host` header may have; "*": any."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Further names of models; the name "*" stands for every other one."""
    pulled: ModelSettings | None = None
    """How models are opened that clients pull, but for the folder; None: clients may not pull or delete models."""
    heartbeat_seconds: float = 10.0
    """Seconds after which the client of a stream that has nothing to say hears that it is alive, again and again."""
    logs_texts: bool = False
    """Whether prompts and answers are logged."""

    def __post_init__(self) -> None:
        if self.api_key is not None:
            _check_key(self.api_key)
        for alias, name in self.aliases.items():
            if name not in self.models or alias in self.models:
                raise FlowNPUError(
                    f"the alias {alias}={name}: expected a new name, and one of the models {', '.join(self.models)}"
                )
        # Browsers write an origin in only one way, so the header can be compared literally.
        object.__setattr__(self, "origins", tuple(map(_canonical_origin, self.origins)))


def _check_key(key: str) -> None:
    """Refuses texts that clients cannot send in a header, or send in different ways (RFC 9110, section 5.5)."""
    if not key or not key.isascii() or not key.isprintable() or key != key.strip():
        # The message does not repeat the key: it may be logged.
        raise FlowNPUError(
            "the server's key: expected printable ASCII characters, without spaces around them, which every client can "
            "send in a header"
        )


def _canonical_origin(text: str) -> str:
    """An origin as browsers write it (RFC 6454, section 6.2): lower case, no port that its scheme implies, no path."""
    if text == "*":
        return text
    try:
        parts = urlsplit(text)
        host, port = parts.hostname or "", parts.port
    except ValueError:  # no number, or none of a port
        host, port = "", None
    if not ORIGIN.fullmatch(text) or not host:
        raise FlowNPUError(
            f"expected an origin as browsers write it, SCHEME://HOST or SCHEME://HOST:PORT, such as "
            f"https://chat.example, or * for all; got {text!r}"
        )
    host = f"[{host}]" if ":" in host else host
    implied = {"http": 80, "https": 443}.get(parts.scheme)
    return f"{parts.scheme}://{host}" + (f":{port}" if port is not None and port != implied else "")
