# SPDX-License-Identifier: Apache-2.0
"""This project's own engine, measured as the peers are: the converted model in ORT GenAI, as `flownpu run` opens it."""

from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from flownpu.generation import LanguageModel, Sampling


class Engine:
    """A model opened in ORT GenAI on FlowNPU's provider, or ONNX Runtime's.

    `options` are those of the provider, with "provider" besides.
    """

    def __init__(self, folder: Path, *, threads: int, context: int, options: dict[str, str]) -> None:
        del context  # a generator has its own length
        options = dict(options)
        provider = options.pop("provider")
        self.version = f"flownpu {version('flownpu')}"
        self._model = LanguageModel(folder, provider=provider, options=options, threads=threads)
        self.placement = self._model.placement["summary"]
        self._generator: Any = None

    def start(self, length: int) -> None:
        """Begins a sequence of up to `length` tokens."""
        self._generator = None  # its KV cache goes before the next one's comes
        self._generator = self._model.generator(length, Sampling(temperature=0), min_length=length)

    def read(self, tokens: Any) -> None:
        """Reads tokens, up to the logits of the last."""
        self._generator.append_tokens(tokens)

    def generate_next(self) -> int:
        """Generates a token."""
        self._generator.generate_next_token()
        return int(self._generator.get_next_tokens()[0])

    def logits(self) -> Any:
        """Of the last token: float32 [V]."""
        return np.asarray(self._generator.get_logits()).reshape(-1)
