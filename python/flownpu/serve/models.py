# SPDX-License-Identifier: Apache-2.0
"""The models of a server by name: those that generate texts are in `catalogue`, all others in `in_process`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from flownpu.model.folder import is_embedding_folder, is_pipeline_folder, is_reranker_folder, read_genai_config
from flownpu.serve.catalogue import Catalogue
from flownpu.serve.chat_prompts import ChatModel
from flownpu.serve.embeddings import Embedder, Ranker
from flownpu.serve.errors import ApiError, invalid, unknown_model
from flownpu.serve.in_process import InProcess
from flownpu.serve.pictures import Painter
from flownpu.serve.processes.protocol import ModelSettings
from flownpu.serve.settings import ServerSettings

Kind = TypeVar("Kind", Embedder, Painter, Ranker)

_ABILITIES = {
    ChatModel: ("generates texts", "/v1/chat/completions"),
    Embedder: ("embeds texts", "/v1/embeddings or /api/embed"),
    Painter: ("makes pictures", "/v1/images/generations"),
    Ranker: ("scores documents", "/v1/rerank"),
}
"""The ability of models of a kind, and the routes that ask for it."""
_KINDS: tuple[tuple[Callable[[Path], bool], type[InProcess[Any]]], ...] = (
    (is_embedding_folder, Embedder),
    (is_pipeline_folder, Painter),
    (is_reranker_folder, Ranker),
)
"""How models are told by their folders that do not run in a process of their own."""


class Models:
    """The models, which may be added and removed; used from the event loop's thread only."""

    def __init__(self, settings: ServerSettings) -> None:
        self.settings = settings
        self.models: dict[str, ModelSettings] = {}
        """How each model is opened, by its name, in the order in which they were given."""
        self.in_process: dict[str, InProcess[Any]] = {}
        self.catalogue = Catalogue(settings.memory)
        self._chats: dict[str, ChatModel] = {}
        for name, model in settings.models.items():
            self.add(name, model)

    def add(self, name: str, model: ModelSettings) -> None:
        """Adds a model, which is loaded when it is first asked for."""
        self.models[name] = model
        kind = next((kind for holds, kind in _KINDS if holds(model.folder)), None)
        if kind is not None:
            self.in_process[name] = kind(name, model, self.settings.limits)
        else:
            self._chats[name] = ChatModel(model.folder)
            self.catalogue.add(name, model)

    async def remove(self, name: str) -> None:
        """Removes a model; requests that it answers are cut short."""
        del self.models[name]
        if self.in_process.pop(name, None) is None:
            del self._chats[name]
            await self.catalogue.remove(name)

    def resolve(self, name: str) -> str:
        """The model's own name, if the given one is an alias."""
        aliases = self.settings.aliases
        return name if name in self.models else aliases.get(name, aliases.get("*", name))

    async def load(self, name: str) -> None:
        """Loads a model, if it is not.

        Raises:
            ApiError: there is no model of that name, or it cannot be loaded.
        """
        name = self.resolve(name)
        if name in self.in_process:
            await self.in_process[name].load()
        else:
            await self.catalogue.get(name)

    async def drop(self, name: str) -> bool:
        """Closes a model until its next request, unless it answers some now; returns whether it is closed.

        Raises:
            ApiError: there is no model of that name.
        """
        name = self.resolve(name)
        if name not in self.models:
            raise unknown_model(name, self.names)
        return await (self.in_process[name].drop() if name in self.in_process else self.catalogue.drop(name))

    def model(self, name: str) -> ChatModel:
        """A model that generates texts, as its folder describes it.

        Raises:
            ApiError: there is no model of that name, or it does something else.
        """
        name = self.resolve(name)
        if name not in self._chats or not self._is_there(name):
            raise self._unfit(name, ChatModel)
        return self._chats[name]

    def _is_there(self, name: str) -> bool:
        """Whether a model's folder is: `flownpu remove` may have removed it since."""
        return name in self.models and self.models[name].folder.is_dir()

    @property
    def names(self) -> list[str]:
        """The names of all models that are there, in the order in which they were given, then aliases."""
        aliases = self.settings.aliases.items()
        there = [name for name in self.models if self._is_there(name)]
        return [*there, *(alias for alias, name in aliases if alias != "*" and name in there)]

    def context_length(self, name: str) -> int | None:
        """Tokens that a prompt and its answer may have together; None for models that generate no texts.

        Raises:
            ApiError: there is no model of that name.
        """
        name = self.resolve(name)
        if name in self.in_process and self._is_there(name):
            return None
        folder = self.model(name).folder
        return min(self.models[name].context, int(read_genai_config(folder)["model"]["context_length"]))

    async def load_first(self) -> None:
        """Loads the model that was given first, if any was.

        Raises:
            ApiError: it cannot be loaded.
        """
        if self.models:
            await self.load(self.names[0])

    async def close(self) -> None:
        """Closes all models."""
        await self.catalogue.close()

    def of_kind(self, name: str, kind: type[Kind]) -> Kind:
        """A model that is not a chat's, of this class.

        Raises:
            ApiError: there is no model of that name, or it does something else.
        """
        found = self.in_process.get(self.resolve(name))
        if not isinstance(found, kind) or not self._is_there(self.resolve(name)):
            raise self._unfit(name, kind)
        return found

    def _unfit(self, name: str, wanted: type) -> ApiError:
        """The error that a model does something else than wanted, or that there is none of that name."""
        if not self._is_there(self.resolve(name)):
            return unknown_model(name, self.names)
        kinds = {other: type({**self._chats, **self.in_process}[other]) for other in self.models}
        does, route = _ABILITIES[kinds[self.resolve(name)]]
        others = ", ".join(other for other, kind in kinds.items() if kind is wanted) or "none"
        asked = _ABILITIES[wanted][0].replace("s ", " ", 1)
        return invalid(f"the model {name} {does}: ask {route}. Of models that {asked} there is here: {others}", "model")
