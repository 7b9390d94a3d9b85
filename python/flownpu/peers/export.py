# SPDX-License-Identifier: Apache-2.0
"""Writes the weights of a converted model in the one 4-bit form that every peer takes, for the peers' own converters.

The peers' common ground is 4 bits and a scale for each 32 weights: w = scale * (code - 8). llama.cpp calls it Q4_0,
ONNX Runtime MatMulNBits without zero points, OpenVINO a symmetric int4 weight with groups of 32. Q4NX has a minimum
besides (5 bits a weight, not 4.5), so its values are encoded again; all peers then hold the same values, bit for bit.
What this costs in accuracy does not matter to a measurement of speed.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from flownpu.errors import FlowNPUError, require
from flownpu.model_folder import onnx_path, read_genai_config
from flownpu.ops import q4nx
from flownpu.peers.exported import GROUP

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from numpy.typing import NDArray

__all__ = ["ExportProgress", "encode", "export_model"]

ExportProgress: TypeAlias = "Callable[[int, int], None]"
"""Hears how many weights of how many are written."""

# Rows that are encoded at once: with 8192 columns, 34 MB of float32.
_ROWS_AT_ONCE = 1024


def encode(weight: NDArray[np.float32]) -> tuple[NDArray[np.uint8], NDArray[np.float16]]:
    """The packed codes and scales of a weight [rows, columns], as in `exported.py`.

    The scale is the value of largest magnitude in a group divided by -8, so that this value has a code of its own; it
    is rounded to float16 before the codes are chosen.
    """
    rows, columns = weight.shape
    groups = weight.reshape(rows, columns // GROUP, GROUP)
    extreme = np.take_along_axis(groups, np.abs(groups).argmax(axis=2, keepdims=True), axis=2)
    scale = (extreme / -8).astype(np.float16)
    inverse = np.divide(1, scale, out=np.zeros(scale.shape, np.float32), where=scale != 0, dtype=np.float32)
    codes = np.clip(np.rint(groups * inverse) + 8, 0, 15).astype(np.uint8).reshape(rows, columns)
    return codes[:, 0::2] | codes[:, 1::2] << 4, scale[..., 0]


def export_model(model: Path, output: Path, *, progress: ExportProgress = lambda _done, _total: None) -> None:
    """Writes a converted model's weights in the form of `exported.py`.

    Args:
        model: a folder that `flownpu convert` made of a checkpoint, or `flownpu make-model`.
        output: an existing folder.
        progress: hears how many weights of how many are written.

    Raises:
        FlowNPUError: the graph is not one that `flownpu convert` writes, or a width is no multiple of 32.
        MissingDependencyError: onnx_ir is not installed.
    """
    graph = _Graph(model)
    (output / "decoder.json").write_text(json.dumps(graph.decoder, indent=1) + "\n", encoding="utf-8")
    parts = graph.projections()
    total, done = sum(rows * columns for _, _, rows, columns, _ in parts), 0
    for name, initializer, rows, columns, first in parts:
        if columns % GROUP:
            raise FlowNPUError(f"{model}: {name} has {columns} columns, the peers need a multiple of {GROUP}")
        codes = np.lib.format.open_memmap(output / f"{name}.codes.npy", "w+", np.uint8, (rows, columns // 2))
        scales = np.empty((rows, columns // GROUP), np.float16)
        for start in range(0, rows, _ROWS_AT_ONCE):
            stop = min(start + _ROWS_AT_ONCE, rows)
            codes[start:stop], scales[start:stop] = encode(
                graph.rows(initializer, first + start, first + stop, columns)
            )
            done += (stop - start) * columns
            progress(done, total)
        np.save(output / f"{name}.scales.npy", scales)
    for name, values in graph.vectors().items():
        np.save(output / f"{name}.npy", values)


class _Graph:
    """The graph that `flownpu.convert.graph` writes, read back."""

    def __init__(self, folder: Path) -> None:
        ir = require("onnx_ir", extra="convert", purpose="flownpu bench --against")
        config = read_genai_config(folder)
        path = onnx_path(folder, config)
        graph = ir.load(path).graph
        self._initializers = graph.initializers
        self._nodes = {node.name: node for node in graph}
        self._layers = int(config["model"]["decoder"]["num_hidden_layers"])
        try:
            self.decoder = self._read_decoder(config["model"])
        except KeyError as error:
            raise FlowNPUError(
                f"{path} has no {error}, which a model that `flownpu convert` made of a checkpoint has; peers can be "
                "measured on such a model, or on one of `flownpu make-model`"
            ) from error

    def projections(self) -> list[tuple[str, str, int, int, int]]:
        """Name, initializer, rows, columns and first row in it, of each weight."""
        decoder = self.decoder
        hidden, feed_forward = decoder["hidden_size"], decoder["feed_forward_size"]
        heads, kv_heads = (decoder[key] * decoder["head_size"] for key in ("heads", "kv_heads"))
        vocabulary = decoder["vocabulary_size"]
        parts = [("embed_tokens", "embed_tokens", vocabulary, hidden, 0)]
        # The up projection begins with a block of its own.
        up = q4nx.blocks_shape(feed_forward, hidden)[0] * q4nx.BLOCK_ROWS
        for i in range(self._layers):
            attention, mlp = f"layers.{i}.self_attn", f"layers.{i}.mlp"
            parts += [
                (f"{attention}.q_proj", f"{attention}.qkv_proj", heads, hidden, 0),
                (f"{attention}.k_proj", f"{attention}.qkv_proj", kv_heads, hidden, heads),
                (f"{attention}.v_proj", f"{attention}.qkv_proj", kv_heads, hidden, heads + kv_heads),
                (f"{attention}.o_proj", f"{attention}.o_proj", hidden, heads, 0),
                (f"{mlp}.gate_proj", f"{mlp}.gate_up_proj", feed_forward, hidden, 0),
                (f"{mlp}.up_proj", f"{mlp}.gate_up_proj", feed_forward, hidden, up),
                (f"{mlp}.down_proj", f"{mlp}.down_proj", hidden, feed_forward, 0),
            ]
        if not decoder["tied_embeddings"]:
            parts.append(("lm_head", "lm_head", vocabulary, hidden, 0))
        return parts

    def rows(self, initializer: str, start: int, stop: int, columns: int) -> NDArray[np.float32]:
        """Rows start..stop-1 of a weight."""
        blocks = self._initializers[initializer].const_value.numpy()
        first, last = start // q4nx.BLOCK_ROWS, -(-stop // q4nx.BLOCK_ROWS)
        values = q4nx.dequantize(blocks[first:last], (last - first) * q4nx.BLOCK_ROWS, columns)
        return values[start - first * q4nx.BLOCK_ROWS :][: stop - start]

    def vectors(self) -> dict[str, NDArray[np.float32]]:
        """Norms, and the rotary embeddings' radians a position."""
        vectors = {
            name: self._values(name) for name in self._initializers if name == "norm" or "norm" in name.split(".")[-1]
        }
        for index in set(self.decoder["rotaries"]):
            # Angles at position 1 are at most 1 radian.
            cos, sin = (self._values(f"rotary.{index}.{part}")[1].astype(np.float64) for part in ("cos", "sin"))
            vectors[f"rotary.{index}"] = np.arctan2(sin, cos).astype(np.float32)
        return vectors

    def _values(self, name: str) -> NDArray[Any]:
        values: NDArray[Any] = self._initializers[name].const_value.numpy()
        return values

    def _scalar(self, name: str, default: float) -> float:
        return float(self._values(name)) if name in self._initializers else default

    def _attributes(self, node: str) -> dict[str, Any]:
        return {name: attribute.value for name, attribute in self._nodes[node].attributes.items()}

    def _read_decoder(self, settings: dict[str, Any]) -> dict[str, Any]:
        attentions = [self._attributes(f"/layers.{i}.self_attn/attention") for i in range(self._layers)]
        gate_up = self._attributes("/layers.0.mlp.gate_up_proj")
        first, head = attentions[0], self._attributes("/lm_head")
        caches = [self._nodes[f"/layers.{i}.self_attn/attention"].inputs[7].name for i in range(self._layers)]
        return {
            "family": settings["type"],
            "hidden_size": gate_up["K"],
            "feed_forward_size": gate_up["M"],
            "heads": first["num_heads"],
            "kv_heads": first["kv_num_heads"],
            "head_size": first["head_size"],
            "vocabulary_size": head["M"],
            "context_length": settings["context_length"],
            "windows": [attention["local_window_size"] for attention in attentions],
            "rotaries": [int(name.split(".")[1]) for name in caches],
            "gating": gate_up["gating"],
            "norm_epsilon": self._attributes("/layers.0.input_layernorm")["epsilon"],
            "attention_scale": first["scale"],
            "attention_softcap": first["softcap"],
            "logit_softcap": self._scalar("logit_softcap", 0.0),
            "embedding_scale": self._scalar("embedding_scale", 1.0),
            "qk_norm": "layers.0.self_attn.q_norm" in self._initializers,
            "sandwich_norms": "layers.0.pre_feedforward_layernorm" in self._initializers,
            "tied_embeddings": "lm_head" not in self._initializers,
        }
