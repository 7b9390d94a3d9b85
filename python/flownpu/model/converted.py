# SPDX-License-Identifier: Apache-2.0
"""Reads back a model that `flownpu convert` wrote: its decoder's description, and its weights one by one."""

from __future__ import annotations

import reprlib
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from flownpu.errors import FlowNPUError
from flownpu.model.folder import onnx_path, read_genai_config
from flownpu.model.onnx_file import load_model, reading
from flownpu.ops import q4nx
from flownpu.ops.contracts import input_position

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

__all__ = ["ConvertedModel"]


class Part(NamedTuple):
    """A weight matrix, which may be some of the rows of an initializer.

    Attributes:
        name: the name in a checkpoint without "model." and ".weight": "layers.0.mlp.up_proj".
        initializer: the name of the graph's tensor of Q4NX blocks that holds it.
        rows: its rows; for a mixture of experts, those of one expert.
        columns: its columns.
        first: the row of the initializer at which it begins.
        experts: how many matrices of `rows` rows the weight has, one for each expert.
        stride: rows of the initializer from the first of one expert's to the first of the next one's.
    """

    name: str
    initializer: str
    rows: int
    columns: int
    first: int
    experts: int = 1
    stride: int = 0

    @property
    def size(self) -> int:
        """How many weights it has in all."""
        return self.experts * self.rows * self.columns


def _has(attention: Any, name: str) -> bool:
    position = input_position("FlowQKVAttention", name)
    return len(attention.inputs) > position and attention.inputs[position] is not None


class ConvertedModel:
    """A model whose graph `flownpu.convert.graph.decoder` wrote.

    Attributes:
        folder: the model's folder.
        path: the file of its graph.
        decoder: the values of the fields that `flownpu.peers.exported.ExportedModel` has, by name.
    """

    def __init__(self, folder: Path) -> None:
        """Opens the graph; its data file is mapped when weights are read.

        Raises:
            FlowNPUError: the folder holds no model, or one that `flownpu convert` did not make of a checkpoint or a
                GGUF file, or a decoder that `decoder` cannot describe.
            MissingDependencyError: onnx_ir is not installed.
        """
        config = read_genai_config(folder)
        self.path = path = onnx_path(folder, config)
        graph = load_model(path, purpose="reading a model's weights").graph
        self.folder = folder
        self._initializers = graph.initializers
        self._nodes = {node.name: node for node in graph}
        with reading(path):
            try:
                self._layers: int = config["model"]["decoder"]["num_hidden_layers"]
                self._check_form()
                self.decoder = self._read_decoder(config["model"])
            except KeyError as error:
                raise FlowNPUError(
                    f"{path} has no {error}, which a model that `flownpu convert` made of a checkpoint has, or of a "
                    "GGUF file; take such a model, or one of `flownpu make-model`"
                ) from error

    def _check_form(self) -> None:
        """Raises FlowNPUError if the model has parts that `decoder` cannot describe, so that none is lost."""
        unknown = {
            "biases": any(name.endswith(".bias") for name in self._initializers),
            "layers without RoPE, or with two": any(
                node.op_type == "FlowQKVAttention" and (not _has(node, "cos_cache") or _has(node, "position_ids"))
                for node in self._nodes.values()
            ),
            "layers without a norm before them": "/layers.0.self_attn/attention" in self._nodes
            and "/layers.0.input_layernorm" not in self._nodes,
            "RoPE of a part of each head": any(
                not np.any(self._values(f"rotary.{i}.sin")[:2, -1])
                for i in range(self._layers)
                if f"rotary.{i}.sin" in self._initializers
            ),
            "RoPE with a magnitude": any(
                self._values(f"rotary.{i}.cos")[0, 0] != 1
                for i in range(self._layers)
                if f"rotary.{i}.cos" in self._initializers
            ),
        }
        if found := [name for name, is_there in unknown.items() if is_there]:
            raise FlowNPUError(
                f"{self.path}: the decoder has {', '.join(found)}, and only decoders without can be read back"
            )

    def projections(self) -> list[Part]:
        """Every weight matrix; some of them share an initializer."""
        decoder = self.decoder
        hidden, feed_forward = decoder["hidden_size"], decoder["feed_forward_size"]
        heads, kv_heads = (decoder[key] * decoder["head_size"] for key in ("heads", "kv_heads"))
        vocabulary = decoder["vocabulary_size"]
        parts = [Part("embed_tokens", "embed_tokens", vocabulary, hidden, 0)]
        # The up projection begins in a new block, and so does each expert.
        up, down = (-(-rows // q4nx.BLOCK_ROWS) * q4nx.BLOCK_ROWS for rows in (feed_forward, hidden))
        experts = decoder["experts"]
        several = {2: (experts, 2 * up), 1: (experts, down)} if experts else {2: (1, 0), 1: (1, 0)}
        for i in range(self._layers):
            attention, mlp = f"layers.{i}.self_attn", f"layers.{i}.mlp{'.experts' * bool(experts)}"
            parts += [
                Part(f"{attention}.q_proj", f"{attention}.qkv_proj", heads, hidden, 0),
                Part(f"{attention}.k_proj", f"{attention}.qkv_proj", kv_heads, hidden, heads),
                Part(f"{attention}.v_proj", f"{attention}.qkv_proj", kv_heads, hidden, heads + kv_heads),
                Part(f"{attention}.o_proj", f"{attention}.o_proj", hidden, heads, 0),
                Part(f"{mlp}.gate_proj", f"{mlp}.gate_up_proj", feed_forward, hidden, 0, *several[2]),
                Part(f"{mlp}.up_proj", f"{mlp}.gate_up_proj", feed_forward, hidden, up, *several[2]),
                Part(f"{mlp}.down_proj", f"{mlp}.down_proj", hidden, feed_forward, 0, *several[1]),
            ]
        if not decoder["tied_embeddings"]:
            parts.append(Part("lm_head", "lm_head", vocabulary, hidden, 0))
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
        """Norms, routers [experts, columns], and the rotary embeddings' radians per position, float32 by name.

        Raises:
            FlowNPUError: a tensor is missing.
        """
        names = [name for name in self._initializers if name.endswith(".router") or "norm" in name.split(".")[-1]]
        with reading(self.path):
            vectors = {name: self._values(name).astype(np.float32, copy=False) for name in names}
            for index in set(self.decoder["rotaries"]):
                # Row 1 of the tables has the angles at position 1: radians per position, and at most 1, so that the
                # arc tangent gives them back.
                cos, sin = (self._values(f"rotary.{index}.{part}")[1].astype(np.float64) for part in ("cos", "sin"))
                vectors[f"rotary.{index}"] = np.arctan2(sin, cos).astype(np.float32)
        return vectors

    def _values(self, name: str) -> NDArray[Any]:
        values: NDArray[Any] = self._initializers[name].const_value.numpy()
        return values

    def _scalar(self, name: str, default: float) -> float:
        return float(self._values(name)) if name in self._initializers else default

    def _attribute(self, node: str, name: str, kind: type) -> Any:
        """The value of a node's attribute; FlowNPUError if it is not of type `kind`: int, float or str."""
        value = self._nodes[node].attributes[name].value
        if type(value) is not kind:
            raise FlowNPUError(
                f"{self.path}: expected attribute {name} of {node} to be {kind.__name__}, got {reprlib.repr(value)}"
            )
        return value

    def _size(self, node: str, name: str) -> int:
        size: int = self._attribute(node, name, int)
        if not 0 < size < 2**31:
            raise FlowNPUError(f"{self.path}: expected attribute {name} of {node} to be a size, got {size}")
        return size

    def _read_decoder(self, settings: dict[str, Any]) -> dict[str, Any]:
        attentions = [f"/layers.{i}.self_attn/attention" for i in range(self._layers)]
        first, experts = attentions[0], "/layers.0.mlp.experts"
        gated, hidden, inner = "/layers.0.mlp.gate_up_proj", "K", "M"
        if is_mixture := experts in self._nodes:
            gated, hidden, inner = experts, "hidden_size", "expert_size"
        cosines = input_position(self._nodes[first].op_type, "cos_cache")
        caches = [self._nodes[attention].inputs[cosines].name for attention in attentions]
        return {
            "family": settings["type"],
            "hidden_size": self._size(gated, hidden),
            "feed_forward_size": self._size(gated, inner),
            "experts": self._size(experts, "num_experts") if is_mixture else 0,
            "experts_per_token": self._size(experts, "experts_per_token") if is_mixture else 0,
            "normalized_experts": is_mixture and bool(self._attribute(experts, "normalize_routing_weights", int)),
            "heads": self._size(first, "num_heads"),
            "kv_heads": self._size(first, "kv_num_heads"),
            "head_size": self._size(first, "head_size"),
            "vocabulary_size": self._size("/lm_head", "M"),
            "context_length": settings["context_length"],
            "windows": [self._attribute(attention, "local_window_size", int) for attention in attentions],
            "rotaries": [int(name.split(".")[1]) for name in caches],
            "gating": self._attribute(gated, "gating", str),
            "norm_epsilon": self._attribute("/layers.0.input_layernorm", "epsilon", float),
            "attention_scale": self._attribute(first, "scale", float),
            "attention_softcap": self._attribute(first, "softcap", float),
            "logit_softcap": self._scalar("logit_softcap", 0.0),
            "embedding_scale": self._scalar("embedding_scale", 1.0),
            "qk_norm": "layers.0.self_attn.q_norm" in self._initializers,
            "norms_of_all_heads": "/layers.0.self_attn.split" in self._nodes,
            "sandwich_norms": "layers.0.pre_feedforward_layernorm" in self._initializers,
            "tied_embeddings": "lm_head" not in self._initializers,
        }
