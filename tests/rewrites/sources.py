# SPDX-License-Identifier: Apache-2.0
"""The entries of the matrix of families and sources: each a decoder with its reference.

An entry is a folder that FlowNPU runs, and its reference in float32 with the same dequantised weights: transformers'
model for checkpoints and GGUF files, the export itself in ONNX Runtime's CPU provider for exports.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from gguf.constants import GGMLQuantizationType as Type
from numpy.typing import NDArray

from flownpu.convert import convert
from tests.convert.conftest import write_tiny
from tests.convert.sources.gguf_files import write_model
from tests.convert.sources.prequantised_checkpoints import Form, write_prequantised
from tests.decoding import DecoderSession
from tests.rewrites.genai_export import SIZES as GENAI_SIZES
from tests.rewrites.optimum_export import DECODER as OPTIMUM_SIZES

Step = Callable[[NDArray[np.int64]], NDArray[np.float32]]

MODEL_TYPES = {"gemma2": "gemma2", "gemma3": "gemma3_text", "llama": "llama", "qwen3": "qwen3"}
FAMILIES = tuple(MODEL_TYPES)
# The cap of gemma2_config (tests/convert/conftest.py) brings the likeliest tokens too close to tell them apart.
CHANGES: dict[str, dict[str, Any]] = {"gemma2": {"final_logit_softcapping": 10.0}}
# A folder of GenAI's builder as it is: attention is folded when the session is made.
UNCONVERTED = "genai-unconverted"


@dataclass(frozen=True)
class Entry:
    """A decoder out of a source.

    Attributes:
        folder: what FlowNPU runs.
        reference: new tokens [1, S] -> their logits [1, S, V], after all that it was given before.
        layers: the decoder's number of layers.
        widest: the number of terms of its longest sum.
    """

    folder: Path
    reference: Step
    layers: int
    widest: int


class Transformers:
    """transformers' model with a KV cache, given a text call by call."""

    def __init__(self, model: transformers.PreTrainedModel) -> None:
        self._model, self._cache = model, transformers.DynamicCache(config=model.config)

    def __call__(self, ids: NDArray[np.int64]) -> NDArray[np.float32]:
        with torch.no_grad(), one_thread():
            logits = self._model(input_ids=torch.from_numpy(ids), past_key_values=self._cache, use_cache=True).logits
        return logits.numpy()  # type: ignore[no-any-return]


@contextmanager
def one_thread() -> Iterator[None]:
    """Has torch use one thread: in tiny models, more would only wait for their turn on a core."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def checkpoint(family: str, folder: Path) -> tuple[Path, Any]:
    """A Hugging Face checkpoint in bfloat16; llama's RoPE is scaled as that of Llama 3.1 and later."""
    tiny = write_tiny(MODEL_TYPES[family], folder / "checkpoint", **CHANGES.get(family, {}))
    return tiny.folder, tiny.reference


def gguf(kind: Type) -> Callable[[str, Path], tuple[Path, Any]]:
    """A GGUF file."""

    def make(family: str, folder: Path) -> tuple[Path, Any]:
        tiny = write_model(folder, MODEL_TYPES[family], CHANGES.get(family), type_of=lambda _: kind)
        return folder / "model.gguf", tiny.reference

    return make


def prequantised(form: Form) -> Callable[[str, Path], tuple[Path, Any]]:
    """An AWQ or GPTQ checkpoint."""

    def make(family: str, folder: Path) -> tuple[Path, Any]:
        tiny = write_prequantised(folder, MODEL_TYPES[family], form, **CHANGES.get(family, {}))
        return tiny.folder, tiny.reference

    return make


CHECKPOINTS: dict[str, Callable[[str, Path], tuple[Path, Any]]] = {
    "huggingface": checkpoint,
    "awq": prequantised(Form("awq", 64)),
    "gptq": prequantised(Form("gptq", 128)),
    "gguf-q4_0": gguf(Type.Q4_0),
    "gguf-q4_1": gguf(Type.Q4_1),
}
SOURCES = (*CHECKPOINTS, UNCONVERTED, "genai", "optimum")


def make_entry(source: str, family: str, folder: Path, request: pytest.FixtureRequest) -> Entry:
    """Makes an entry in an empty folder; exports come from the session's fixtures."""
    if source in CHECKPOINTS:
        path, model = CHECKPOINTS[source](family, folder)
        convert(path, folder / "model", kv_dtype="fp32")
        config = model.config
        return Entry(folder / "model", Transformers(model), config.num_hidden_layers, config.intermediate_size)
    if source == "optimum":
        made = request.getfixturevalue("folded")[family]
        reference = DecoderSession(request.getfixturevalue("references")[family])
        return Entry(made, reference, OPTIMUM_SIZES["num_hidden_layers"], OPTIMUM_SIZES["intermediate_size"])
    made = export = request.getfixturevalue("exports")[family]
    if source != UNCONVERTED:
        made = folder / "model"
        convert(export, made, kv_dtype="fp32")
    return Entry(made, DecoderSession(export), GENAI_SIZES["num_hidden_layers"], GENAI_SIZES["intermediate_size"])
