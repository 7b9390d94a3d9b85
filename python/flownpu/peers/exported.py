# SPDX-License-Identifier: Apache-2.0
"""Reads the folder that `export.py` writes. Runs in the peers' environments: numpy and the standard library only.

    decoder.json            the fields of ExportedModel
    NAME.codes.npy          uint8 [rows, columns / 2]: column 2i in the low nibble, 2i + 1 in the high one
    NAME.scales.npy         float16 [rows, columns / 32]
    NAME.npy                float32: a norm's weight, by which a value is multiplied as it is, a router
                            [experts, hidden size], or rotary.I, radians per position [d / 2]

A weight is w = scale * (code - 8). NAME is a checkpoint's, without ".weight" and "model.": "layers.0.mlp.up_proj". The
experts of a mixture are one weight, "layers.0.mlp.experts.up_proj", with the experts' rows one after another.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

GROUP = 32


@dataclass(frozen=True)
class ExportedModel:
    """A decoder-only transformer; the fields are those of `flownpu.convert.decoder.Decoder`."""

    folder: Path
    family: str
    hidden_size: int
    feed_forward_size: int
    """The size of one expert, if there are experts."""
    experts: int
    """Experts in a layer; 0: each layer has one plain feed-forward network."""
    experts_per_token: int
    normalized_experts: bool
    """Whether the weights of a token's experts are scaled to the sum 1."""
    heads: int
    kv_heads: int
    head_size: int
    vocabulary_size: int
    context_length: int
    windows: list[int]
    """How many positions the queries of each layer see; -1: all."""
    rotaries: list[int]
    """For each layer the I of its rotary.I."""
    gating: str
    """"geglu" or "swiglu"."""
    norm_epsilon: float
    attention_scale: float
    attention_softcap: float
    logit_softcap: float
    embedding_scale: float
    qk_norm: bool
    norms_of_all_heads: bool
    """With qk_norm: one norm is over all of a token's query heads together, one over all its key heads."""
    sandwich_norms: bool
    tied_embeddings: bool

    @classmethod
    def read(cls, folder: Path) -> "ExportedModel":
        """The model in a folder."""
        fields: dict[str, Any] = json.loads((folder / "decoder.json").read_text(encoding="utf-8"))
        return cls(folder=folder, **fields)

    def check_dense(self) -> None:
        """Raises ValueError for experts or norms of all heads together, for converters that do not write them."""
        if self.experts or self.norms_of_all_heads:
            raise ValueError("this converter writes no mixtures of experts, and no norms of all heads at once")

    def codes(self, name: str) -> Any:
        """The packed codes of a weight, memory-mapped: uint8 [rows, columns / 2]."""
        return np.load(self.folder / f"{name}.codes.npy", mmap_mode="r")

    def scales(self, name: str) -> Any:
        """The scales of a weight: float16 [rows, columns / 32]."""
        return np.load(self.folder / f"{name}.scales.npy")

    def vector(self, name: str) -> Any:
        """A norm's weight, a router or rotary frequencies: float32."""
        return np.load(self.folder / f"{name}.npy")

    def stacked(self, names: Iterable[str]) -> tuple[Any, Any]:
        """Codes and scales of several weights, concatenated along their rows."""
        names = list(names)
        return np.concatenate([self.codes(n) for n in names]), np.concatenate([self.scales(n) for n in names])

    def rotary_caches(self, index: int, positions: int) -> tuple[Any, Any]:
        """Cos and sin of each position's angles: float32 [positions, d / 2]."""
        angles = np.arange(positions, dtype=np.float32)[:, None] * self.vector(f"rotary.{index}")
        return np.cos(angles), np.sin(angles)
