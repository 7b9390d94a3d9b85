# SPDX-License-Identifier: Apache-2.0
"""Models that embed texts. They run in the server's process: ONNX Runtime releases Python's lock while it computes."""

import asyncio
import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flownpu.errors import FlowNPUError, require
from flownpu.serve.errors import ApiError, busy, invalid, not_loaded, too_long
from flownpu.serve.processes.protocol import ModelSettings
from flownpu.serve.settings import Limits

if TYPE_CHECKING:
    from flownpu.embed import EmbeddingModel, Embeddings

MOST_TEXTS = 2048
"""Texts in one request; the limit of OpenAI's API."""

log = logging.getLogger(__name__)


@dataclass
class Embedder:
    """One model, loaded when it is first asked for; it computes one request at a time.

    Used from the event loop's thread only.
    """

    name: str
    settings: ModelSettings
    limits: Limits
    requests: int = 0
    """How many wait or are computed."""

    def __post_init__(self) -> None:
        self._lock = asyncio.Lock()
        self._model: EmbeddingModel | None = None

    @property
    def is_loaded(self) -> bool:
        """Whether the model is open."""
        return self._model is not None

    async def load(self) -> "EmbeddingModel":
        """Opens the model, if it is not.

        Raises:
            ApiError: it cannot be opened.
        """
        async with self._lock:
            return await self._opened()

    async def embed(self, texts: list[str], *, dimensions: int | None = None, truncate: bool = False) -> "Embeddings":
        """Embeds texts.

        Args:
            texts: the texts of one request.
            dimensions: see `EmbeddingModel.embed`.
            truncate: whether texts that are too long are cut, rather than refused.

        Raises:
            ApiError: there are too many texts or requests, the time limit is over, the model cannot be opened, a text
                is too long, or `EmbeddingModel.embed` refuses an argument.
        """
        if len(texts) > MOST_TEXTS:
            raise invalid(f"expected {MOST_TEXTS} texts at most, got {len(texts)}", "input")
        if self.requests > self.limits.queue:
            raise busy(f"{self.requests} requests wait or are computed: try again later", self.requests)
        self.requests += 1
        try:
            async with asyncio.timeout(self.limits.request_seconds), self._lock:
                model = await self._opened()
                found = await asyncio.to_thread(model.embed, texts, dimensions=dimensions)
        except TimeoutError:
            raise ApiError(
                504,
                f"the embeddings took more than {self.limits.request_seconds:.0f} s, and were given up",
                code="timeout",
            ) from None
        except FlowNPUError as error:
            raise invalid(str(error), "input") from error
        finally:
            self.requests -= 1
        if found.cut and not truncate:
            raise too_long(
                f"input.{found.cut[0]} is longer than the {model.longest} tokens that the model takes: shorten it",
                "input",
            )
        return found

    async def _opened(self) -> "EmbeddingModel":
        if self._model is None:
            embed = require("flownpu.embed", extra="embed", purpose="Embeddings")
            settings, started = self.settings, time.perf_counter()
            log.info("%s: loading", self.name)
            try:
                model: EmbeddingModel = await asyncio.to_thread(
                    embed.EmbeddingModel,
                    settings.folder,
                    provider=settings.provider,
                    options=settings.options,
                    threads=settings.threads,
                )
            except (FlowNPUError, RuntimeError) as error:
                log.exception("%s: cannot be loaded", self.name, exc_info=None)
                raise not_loaded(self.name, error) from error
            log.info("%s: loaded in %.1f s. %s", self.name, time.perf_counter() - started, model.placement)
            self._model = model
        return self._model
