# SPDX-License-Identifier: Apache-2.0
"""What a server is told when it starts."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from flownpu.serve.processes.protocol import ModelSettings

__all__ = ["Limits", "ServerSettings"]


@dataclass(frozen=True)
class Limits:
    """What one request, and all of them together, may take."""

    body_bytes: int = 32 * 2**20
    """A request's body: a few photographs as base64, or the text of some books."""
    body_seconds: float = 30.0
    """For a connection's first headers, and for each body."""
    images: int = 16
    """In one conversation."""
    choices: int = 16
    """Answers to one request: `n`, times the prompts of a completion."""
    output_tokens: int | None = None
    """One answer, whatever a request asks for; None: what the context holds."""
    queue: int = 64
    """Answers of one model that wait, beyond those that are computed."""
    request_seconds: float = 600.0
    """From the end of a request to the end of its answer, waiting included."""
    stopping_seconds: float = 30.0
    """That requests may still take when the server is told to end."""


@dataclass(frozen=True)
class ServerSettings:
    """Models and who may use them."""

    models: Mapping[str, ModelSettings]
    """By the name that clients know them by."""
    limits: Limits = field(default_factory=Limits)
    memory: int | None = None
    """Bytes that all models' processes together may be of; None: no limit."""
    api_key: str | None = None
    """What clients must show; None: nothing."""
    origins: tuple[str, ...] = ()
    """Web pages of other origins that may use the server: "https://chat.example"."""
    hosts: tuple[str, ...] = ("*",)
    """Names by which clients may call the server; "*": any."""
    logs_texts: bool = False
    """Whether prompts and answers are logged."""
