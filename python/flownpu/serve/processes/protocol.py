# SPDX-License-Identifier: Apache-2.0
"""The messages between a server and the process of a model."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flownpu.generate.language_model import Sampling
from flownpu.generate.speculative.model import Speculation

if TYPE_CHECKING:
    from flownpu.generate.guidance import Guidance
    from flownpu.generate.images import PreparedImage

Prompt = str | tuple[int, ...] | tuple[dict[str, Any], ...]


@dataclass(frozen=True)
class ModelSettings:
    """How a model is opened."""

    folder: Path
    provider: str = "flownpu"
    options: dict[str, str] = field(default_factory=dict)
    threads: int | None = None
    context: int = 4096
    """Tokens of a prompt and its answer together; a smaller context length of the model takes precedence."""
    slots: int = 4
    """Requests that a model that is not paged computes at the same time."""
    speculation: Speculation = field(default_factory=Speculation)
    """The sources of candidates for the next tokens."""
    allow_control_tokens: bool = False
    """Whether control tokens that are written in the texts of a conversation count as such."""


@dataclass(frozen=True)
class Question:
    """A request for one answer: a `flownpu.generate.worker.Request` whose prompt may not be tokens yet."""

    prompt: Prompt
    """A text, its tokens, or the turns of a conversation, which the model's chat template writes."""
    tools: tuple[dict[str, Any], ...] = ()
    """Functions for the chat template, as OpenAI's API describes them."""
    variables: dict[str, Any] = field(default_factory=dict)
    """Further variables for the chat template."""
    max_new_tokens: int | None = None
    """None: as many as fit in the context; 0: the prompt, however long, is only counted, unless `echo` is set."""
    sampling: Sampling = field(default_factory=Sampling)
    images: "tuple[PreparedImage, ...]" = ()
    stop: tuple[str, ...] = ()
    guidance: "Guidance | None" = None
    alternatives: int | None = None
    echo: bool = False

    @property
    def only_counts(self) -> bool:
        """Whether only the prompt's tokens are counted."""
        return self.max_new_tokens == 0 and not self.echo

    @property
    def parameter(self) -> str:
        """The field of OpenAI's API that has the prompt."""
        return "messages" if self.prompt and isinstance(self.prompt[0], dict) else "prompt"


@dataclass(frozen=True)
class ModelFacts:
    """The facts about a model that its process sends to the server when the model is open."""

    context_length: int
    slots: int
    gives_likelihoods: bool
    takes_images: bool
    has_chat_template: bool
    placement: str
    """A line about which devices compute which nodes."""
    load_seconds: float
