# SPDX-License-Identifier: Apache-2.0
"""Requests of Ollama's API that change which models there are."""

from typing import Any

from pydantic import AliasChoices, ConfigDict, Field

from flownpu.serve.requests.openai import Strict


class NamedModel(Strict):
    """A model by its name; older clients call the field `name`."""

    model: str = Field(validation_alias=AliasChoices("model", "name"))

    @property
    def plain(self) -> str:
        """The name without the tag that Ollama adds."""
        return self.model.removesuffix(":latest")


class OllamaPull(NamedModel):
    """The fields of /api/pull."""

    stream: bool | None = None
    insecure: bool | None = None
    """The address of the hub says it."""


class OllamaCreate(NamedModel):
    """The fields of /api/create, which is refused whatever they are."""

    model_config = ConfigDict(extra="ignore")

    source: Any = Field(None, alias="from")
