# SPDX-License-Identifier: Apache-2.0
"""Reads back a model that `flownpu convert` wrote: its decoder's description, and its weights one by one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from flownpu._native import Attention
from flownpu.errors import FlowNPUError
from flownpu.model.folder import onnx_path, read_genai_config
from flownpu.model.onnx_file import load_model, reading
from flownpu.ops import q4nx

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray


class WeightRows(NamedTuple):
    """A weight matrix, which may be some of the rows of an initializer.

    Attributes:
        name: the name in a checkpoint without "model." and ".weight": "layers.0.mlp.up_proj".
        initializer: the name of the graph's tensor of Q4NX blocks that holds it.
        rows: its rows.
        columns: its columns.
        first: the row of the initializer at which it begins.
    """

    name: str
    initializer: str
    rows: int
    columns: int
    first: int


class ConvertedModel:
    """A dense model whose graph `flownpu.convert.graph.decoder` wrote.

    Attributes:
        folder: the model's folder.
        path: the file of its graph.
        family: GenAI's name of its family.
        decoder: its layers, as they are found in the graph.
        embedding_scale: the factor of the embeddings.
        tied_embeddings: whether the LM head has the embeddings' weights.
    """

    def __init__(self, folder: Path) -> None:
        """Opens the graph; its data file is mapped when weights are read.

        Raises:
            FlowNPUError: the folder holds no model, or one that `flownpu convert` did not make of a checkpoint or a
                GGUF file, or a decoder with parts that cannot be read back.
            MissingDependencyError: onnx_ir is not installed.
        """
        config = read_genai_config(folder)
        self.path = path = onnx_path(folder, config)
        model = load_model(path, purpose="reading a model's weights")
        from flownpu.graph_rewrites.native_graph import find_decoder  # noqa: PLC0415 needs the extra "convert"

        self.folder, self.family = folder, config["model"]["type"]
        self._initializers = model.graph.initializers
        with reading(path):
            try:
                self.decoder = find_decoder(model)
                self._check_rotary()
                scale = "embedding_scale"
                self.embedding_scale = float(self._values(scale)) if scale in self._initializers else 1.0
            except (KeyError, ValueError) as error:
                raise FlowNPUError(
                    f"{path}: expected a model that `flownpu convert` made of a checkpoint or of a GGUF file, or "
                    f"`flownpu make-model`, whose layers can be read back: {error}"
                ) from error
        self.tied_embeddings = "lm_head" not in self._initializers

    def _check_rotary(self) -> None:
        """Raises ValueError for rotary tables of which `vectors` cannot give the frequencies."""
        for index in self._tables:
            if self._values(f"rotary.{index}.cos")[0, 0] != 1:
                raise ValueError("RoPE with a magnitude")
            if not np.any(self._values(f"rotary.{index}.sin")[:2, -1]):
                raise ValueError("RoPE of a part of each head")

    @property
    def _tables(self) -> list[int]:
        """The indices of the rotary tables, which a file has in the order of their first use, like the description."""
        return sorted({attention.table for attention in self._attentions})

    @property
    def _attentions(self) -> list[Attention]:
        return [layer.mixer for layer in self.decoder.layers if isinstance(layer.mixer, Attention)]

    def projections(self) -> list[WeightRows]:
        """Every weight matrix; some of them share an initializer."""
        decoder, first, mixer = self.decoder, self.decoder.layers[0], self._attentions[0]
        hidden, feed_forward, vocabulary = decoder.hidden, first.feed_forward.size, decoder.vocabulary
        heads, kv_heads = (count * mixer.head_size for count in (mixer.heads, mixer.kv_heads))
        parts = [WeightRows("embed_tokens", "embed_tokens", vocabulary, hidden, 0)]
        up = -(-feed_forward // q4nx.BLOCK_ROWS) * q4nx.BLOCK_ROWS  # the up projection begins in a new block
        for i in range(len(decoder.layers)):
            attention, mlp = f"layers.{i}.self_attn", f"layers.{i}.mlp"
            parts += [
                WeightRows(f"{attention}.q_proj", f"{attention}.qkv_proj", heads, hidden, 0),
                WeightRows(f"{attention}.k_proj", f"{attention}.qkv_proj", kv_heads, hidden, heads),
                WeightRows(f"{attention}.v_proj", f"{attention}.qkv_proj", kv_heads, hidden, heads + kv_heads),
                WeightRows(f"{attention}.o_proj", f"{attention}.o_proj", hidden, heads, 0),
                WeightRows(f"{mlp}.gate_proj", f"{mlp}.gate_up_proj", feed_forward, hidden, 0),
                WeightRows(f"{mlp}.up_proj", f"{mlp}.gate_up_proj", feed_forward, hidden, up),
                WeightRows(f"{mlp}.down_proj", f"{mlp}.down_proj", hidden, feed_forward, 0),
            ]
        if not self.tied_embeddings:
            parts.append(WeightRows("lm_head", "lm_head", vocabulary, hidden, 0))
        return parts

    def quantized(self, initializer: str, start: int, stop: int, columns: int) -> q4nx.Quantized:
        """Rows start..stop-1 of an initializer: codes, scales and minima; FlowNPUError if it is not in the graph."""
        first, last = start // q4nx.BLOCK_ROWS, -(-stop // q4nx.BLOCK_ROWS)
        with reading(self.path):
            blocks = self._initializers[initializer].const_value.numpy()
            whole = q4nx.unpack(blocks[first:last], (last - first) * q4nx.BLOCK_ROWS, columns)
        wanted = slice(start - first * q4nx.BLOCK_ROWS, stop - first * q4nx.BLOCK_ROWS)
        return q4nx.Quantized(*(field[wanted] for field in whole))

    def vectors(self) -> dict[str, NDArray[np.float32]]:
        """Norms, and the rotary embeddings' radians per position, float32 by name.

        Raises:
            FlowNPUError: a tensor is missing.
        """
        names = [name for name in self._initializers if "norm" in name.split(".")[-1]]
        with reading(self.path):
            vectors = {name: self._values(name).astype(np.float32, copy=False) for name in names}
            for index in self._tables:
                # Row 1 of the tables has the angles at position 1, which are radians per position. They are at most 1,
                # so the arc tangent recovers them.
                cos, sin = (self._values(f"rotary.{index}.{part}")[1].astype(np.float64) for part in ("cos", "sin"))
                vectors[f"rotary.{index}"] = np.arctan2(sin, cos).astype(np.float32)
        return vectors

    def _values(self, name: str) -> NDArray[Any]:
        values: NDArray[Any] = self._initializers[name].const_value.numpy()
        return values
