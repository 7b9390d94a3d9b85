# SPDX-License-Identifier: Apache-2.0
"""Turns a text's hidden states into its embedding, as the model's files from sentence-transformers say.

`modules.json` lists the parts: the transformer, a pooling (`1_Pooling/config.json`), dense layers, a normalisation.
`config_sentence_transformers.json` has the prompts that are put before texts.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

from flownpu.embed.pooling import POOLINGS
from flownpu.errors import FlowNPUError
from flownpu.model.folder import MODULES, read_json

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from numpy.typing import NDArray

# Older versions of sentence-transformers write "pooling_mode_mean_tokens": true, newer ones "pooling_mode": "mean".
_FLAGS = {
    "cls_token": "cls",
    "mean_tokens": "mean",
    "max_tokens": "max",
    "mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "weightedmean_tokens": "weightedmean",
    "lasttoken": "lasttoken",
}
_ACTIVATIONS: dict[str, Callable[[NDArray[np.float32]], NDArray[np.float32]]] = {
    "Identity": lambda vectors: vectors,
    "Tanh": np.tanh,
}


class Stage(Protocol):
    """A stage after the pooling, which takes and returns embeddings float32 [N, D]."""

    def __call__(self, vectors: NDArray[np.float32], /) -> NDArray[np.float32]:
        """The embeddings after this stage; their D may be another."""


def normalised(vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    """Vectors [N, D] scaled to length 1; a vector of zeros stays as it is."""
    lengths = np.linalg.norm(vectors, axis=-1, keepdims=True)
    scaled: NDArray[np.float32] = vectors / np.maximum(lengths, np.float32(1e-12))
    return scaled


@dataclass(frozen=True)
class Dense:
    """A product with a bias and an activation: weight float32 [out, in], bias [out]."""

    weight: NDArray[np.float32]
    bias: NDArray[np.float32] | None
    activation: str

    def __call__(self, vectors: NDArray[np.float32]) -> NDArray[np.float32]:
        """From float32 [N, in] to float32 [N, out]."""
        product = vectors @ self.weight.T
        return _ACTIVATIONS[self.activation](product if self.bias is None else product + self.bias)


@dataclass(frozen=True)
class Pipeline:
    """The stages that follow the transformer, and the prompts: texts by name, of which one may be the default."""

    poolings: tuple[str, ...]
    """Keys of POOLINGS; the results of several are concatenated."""
    stages: tuple[Stage, ...]
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None

    @property
    def normalises(self) -> bool:
        """Whether embeddings have length 1."""
        return bool(self.stages) and self.stages[-1] is normalised

    def embeddings(self, hidden: NDArray[np.float32], lengths: NDArray[np.int64]) -> NDArray[np.float32]:
        """Embeddings [N, E] from hidden states [N, S, D]; row i has `lengths[i]` tokens, and padding after them."""
        pooled = [POOLINGS[name](hidden, lengths) for name in self.poolings]
        vectors: NDArray[np.float32] = np.concatenate(pooled, axis=-1)
        for stage in self.stages:
            vectors = stage(vectors)
        return vectors

    def prompt(self, name: str | None) -> str:
        """The text to put before each text: the prompt of that name; for None the default one, or "".

        Raises:
            FlowNPUError: there is no prompt of that name.
        """
        name = self.default_prompt if name is None else name
        if name is None:
            return ""
        if name not in self.prompts:
            known = ", ".join(self.prompts) or "none"
            raise FlowNPUError(f"no prompt is named {name!r}: config_sentence_transformers.json has {known}")
        return self.prompts[name]


def read_pipeline(folder: Path) -> Pipeline:
    """Reads the pipeline from a model folder's files.

    Raises:
        FlowNPUError: a file is missing, or asks for something that is not supported.
    """
    path = folder / MODULES
    if not path.is_file():
        raise FlowNPUError(
            f"{folder} holds no {MODULES}, which says how hidden states become embeddings: convert a checkpoint of "
            "sentence-transformers"
        )
    first, *others = _modules(path)
    if first[0] != "Transformer":
        raise FlowNPUError(f"{path}: expected the first module to be a Transformer, got a {first[0]}")
    if not others or others[0][0] != "Pooling":
        got = f"a {others[0][0]}" if others else "none"
        raise FlowNPUError(f"{path}: expected the second module to be a Pooling, got {got}")
    stages = tuple(_stage(folder, kind, place) for kind, place in others[1:])
    prompts_file = folder / "config_sentence_transformers.json"
    settings = read_json(prompts_file) if prompts_file.is_file() else {}
    prompts = settings.get("prompts") or {}
    default = settings.get("default_prompt_name")
    texts = isinstance(prompts, dict) and all(isinstance(text, str) for text in prompts.values())
    if not texts or not (default is None or isinstance(default, str)):
        raise FlowNPUError(f"{prompts_file}: expected prompts to be texts by name, got {prompts!r}")
    return Pipeline(_poolings(folder / others[0][1] / "config.json", prompts), stages, prompts, default)


def _modules(path: Path) -> list[tuple[str, str]]:
    """The kind of each module ("Pooling") and its folder."""
    try:
        modules: Any = json.loads(path.read_text(encoding="utf-8"))
        found = [(str(module["type"]).rpartition(".")[2], str(module["path"])) for module in modules]
    except (ValueError, TypeError, KeyError) as error:
        raise FlowNPUError(f"{path}: expected a list of modules, each with its type and path, got {error}") from error
    if not found:
        raise FlowNPUError(f"{path}: expected a list of modules, and it is empty")
    return found


def _poolings(path: Path, prompts: Mapping[str, str]) -> tuple[str, ...]:
    settings = read_json(path) if path.is_file() else {}
    named = settings.get("pooling_mode")
    names = [named] if isinstance(named, str) else list(named or [])
    names += [name for flag, name in _FLAGS.items() if settings.get(f"pooling_mode_{flag}") is True]
    unknown = [name for name in names if name not in POOLINGS]
    if not names or unknown:
        got = ", ".join(map(str, unknown)) or "none"
        raise FlowNPUError(f"{path}: expected a pooling of {', '.join(POOLINGS)}, got {got}, which is not supported")
    if settings.get("include_prompt", True) is False and any(prompts.values()):
        raise FlowNPUError(
            f"{path}: include_prompt is false, so that a prompt's tokens would have no part in the pooling: this is "
            "not supported"
        )
    return tuple(names)


def _stage(folder: Path, kind: str, place: str) -> Stage:
    if kind == "Normalize":
        return normalised
    if kind != "Dense":
        raise FlowNPUError(f"{folder / MODULES}: expected modules Pooling, Dense and Normalize, got {kind}")
    settings = read_json(folder / place / "config.json")
    activation = str(settings.get("activation_function", "")).rpartition(".")[2]
    if activation not in _ACTIVATIONS:
        raise FlowNPUError(
            f"{folder / place / 'config.json'}: expected an activation of {', '.join(_ACTIVATIONS)}, got {activation!r}"
        )
    path = folder / place / "model.safetensors"
    try:
        tensors = load_file(path)
        weight, bias = tensors["linear.weight"], tensors.get("linear.bias")
    except (OSError, SafetensorError, KeyError) as error:
        raise FlowNPUError(f"{path}: expected a dense layer's linear.weight: {error}") from error
    floats = weight.astype(np.float32)
    return Dense(floats, None if bias is None else bias.astype(np.float32), activation)
