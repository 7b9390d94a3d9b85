# SPDX-License-Identifier: Apache-2.0
"""This project's own engine, measured as the peers are: the converted model in ORT GenAI, as `flownpu run` opens it."""

from importlib.metadata import version
from pathlib import Path
from typing import Any

from flownpu.generate.language_model import LanguageModel, Sampling
from flownpu.peers import onnxruntime_genai


class Engine(onnxruntime_genai.Engine):
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
