# SPDX-License-Identifier: Apache-2.0
"""Reads the folder that `export.py` writes. Runs in the peers' environments: numpy and the standard library only.

    decoder.json            the fields of ExportedModel
    NAME.codes.npy          uint8 [rows, columns / 2]: column 2i in the low nibble, 2i + 1 in the high one
    NAME.scales.npy         float16 [rows, columns / 32]
    NAME.npy                float32: a norm's weight as one multiplies by it, a router [experts, hidden size], or
                            rotary.I, radians a position [d / 2]

A weight is w = scale * (code - 8). NAME is a checkpoint's, without ".weight" and "model.": "layers.0.mlp.up_proj". The
experts of a mixture are one weight, "layers.0.mlp.experts.up_proj", an expert's rows below those of the one before.
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
    """An expert's, where there are experts."""
    experts: int
    """0: a feed-forward in their place."""
    experts_per_token: int
    normalized_experts: bool
    """The weights of a token's experts have the sum 1."""
    heads: int
    kv_heads: int
    head_size: int
    vocabulary_size: int
    context_length: int
    windows: list[int]
    """Positions that each layer's queries see, -1 for all."""
    rotaries: list[int]
    """Which of the rotary.I each layer takes."""
    gating: str
    """"geglu" or "swiglu"."""
    norm_epsilon: float
    attention_scale: float
    attention_softcap: float
    logit_softcap: float
    embedding_scale: float
    qk_norm: bool
    norms_of_all_heads: bool
    """With qk_norm: over all of a token's query heads at once, and all its key heads."""
    sandwich_norms: bool
    tied_embeddings: bool

    @classmethod
    def read(cls, folder: Path) -> "ExportedModel":
        """The model in a folder."""
        fields: dict[str, Any] = json.loads((folder / "decoder.json").read_text(encoding="utf-8"))
        return cls(folder=folder, **fields)

    def check_dense(self) -> None:
        """Raises ValueError where it has experts, or norms of all heads at once: not every converter writes them."""
        if self.experts or self.norms_of_all_heads:
            raise ValueError("this converter writes no mixtures of experts, and no norms of all heads at once")

    def codes(self, name: str) -> Any:
        """The packed codes of a weight, mapped: uint8 [rows, columns / 2]."""
        return np.load(self.folder / f"{name}.codes.npy", mmap_mode="r")

    def scales(self, name: str) -> Any:
        """The scales of a weight: float16 [rows, columns / 32]."""
        return np.load(self.folder / f"{name}.scales.npy")

    def vector(self, name: str) -> Any:
        """A norm's weight or rotary frequencies: float32."""
        return np.load(self.folder / f"{name}.npy")

    def stacked(self, names: Iterable[str]) -> tuple[Any, Any]:
        """Codes and scales of weights below one another."""
        names = list(names)
        return np.concatenate([self.codes(n) for n in names]), np.concatenate([self.scales(n) for n in names])

    def rotary_caches(self, index: int, positions: int) -> tuple[Any, Any]:
        """Cos and sin of each position's angles: float32 [positions, d / 2]."""
        angles = np.arange(positions, dtype=np.float32)[:, None] * self.vector(f"rotary.{index}")
        return np.cos(angles), np.sin(angles)
