# SPDX-License-Identifier: Apache-2.0
"""The engine that `flownpu bench` measures: a model opened in ORT GenAI as `flownpu run` opens it."""

from importlib.metadata import version
from pathlib import Path
from typing import Any

from flownpu.generate.language_model import LanguageModel, Sampling


class Engine:
    """A model in ORT GenAI, on FlowNPU's provider or another of ONNX Runtime's; `worker.py` calls it."""

    def __init__(self, folder: Path, *, threads: int, context: int, options: dict[str, str]) -> None:
        """Opens the model.

        Args:
            folder: the model's folder.
            threads: threads that compute.
            context: unused: each sequence has a length of its own.
            options: "provider", the provider's name, and the options of the provider.

        Raises:
            FlowNPUError: the model cannot be opened, see `LanguageModel`.
        """
        del context
        options = dict(options)
        provider = options.pop("provider")
        self.version = f"flownpu {version('flownpu')}"
        self._model = LanguageModel(folder, provider=provider, options=options, threads=threads)
        self.placement = self._model.placement["summary"]
        self._generator: Any = None

    def start(self, length: int) -> None:
        """Begins a sequence of `length` tokens; a token that ends the text does not end it earlier."""
        self._generator = None  # frees its KV cache before the next one is allocated
        self._generator = self._model.generator(length, Sampling(temperature=0), min_length=length)

    def read(self, tokens: Any) -> None:
        """Computes tokens, int32 [count], up to the logits of the last."""
        self._generator.append_tokens(tokens)

    def generate_next(self) -> int:
        """Generates the likeliest token."""
        self._generator.generate_next_token()
        return int(self._generator.get_next_tokens()[0])
