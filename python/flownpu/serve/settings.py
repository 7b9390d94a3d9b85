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
    """Within which a connection's first headers must arrive, and each body."""
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
    """How long requests may still run after the server is told to end."""


@dataclass(frozen=True)
class ServerSettings:
    """Models and who may use them."""

    models: Mapping[str, ModelSettings]
    """How each model is opened, by the name that clients know it by."""
    limits: Limits = field(default_factory=Limits)
    memory: int | None = None
    """Resident bytes that all models' processes together may have; None: no limit."""
    api_key: str | None = None
    """The key that clients must show; None: they need none."""
    origins: tuple[str, ...] = ()
    """Other origins whose web pages may use the server, such as "https://chat.example"."""
    hosts: tuple[str, ...] = ("*",)
    """Host names that a request's `Host` header may have; "*": any."""
    logs_texts: bool = False
    """Whether prompts and answers are logged."""
