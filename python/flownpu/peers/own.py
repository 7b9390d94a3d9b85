# SPDX-License-Identifier: Apache-2.0
"""This project's engine in the form of a peer's: the converted model in ORT GenAI, opened like in `flownpu run`."""

from importlib.metadata import version
from pathlib import Path
from typing import Any

from flownpu.generate.language_model import LanguageModel, Sampling
from flownpu.peers import onnxruntime_genai


class Engine(onnxruntime_genai.Engine):
    """A model opened in ORT GenAI on FlowNPU's provider, or ONNX Runtime's.

    `options` are those of the provider, and "provider", the provider's name.
    """

    def __init__(self, folder: Path, *, threads: int, context: int, options: dict[str, str]) -> None:
        del context  # each generator has its own length
        options = dict(options)
        provider = options.pop("provider")
        self.version = f"flownpu {version('flownpu')}"
        self._model = LanguageModel(folder, provider=provider, options=options, threads=threads)
        self.placement = self._model.placement["summary"]
        self._generator: Any = None

    def start(self, length: int) -> None:
        """Begins a sequence of up to `length` tokens."""
        self._generator = None  # frees its KV cache before the next one is allocated
        self._generator = self._model.generator(length, Sampling(temperature=0), min_length=length)
