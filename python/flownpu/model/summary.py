# SPDX-License-Identifier: Apache-2.0
"""Summarises a model file from its graph or header alone; no weight is read."""

import math
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from flownpu.errors import FlowNPUError
from flownpu.model.folder import MANIFEST, onnx_path, other_graphs, read_genai_config, read_json
from flownpu.model.onnx_file import load_model, reading
from flownpu.ops.q4nx import BLOCK_BYTES

DOMAIN = "ai.flownpu"
Q4NX = "q4nx"
# The beginning of GenAI's names of the inputs that hold the KV cache, [B, G, past length, d].
CACHE_PREFIX = "past_key_values."
# safetensors' names of the types in a .q4nx file, with our names and the bytes of a value.
SAFETENSORS_TYPES = {"BF16": ("bfloat16", 2), "I8": ("int8", 1)}


@dataclass(frozen=True)
class Value:
    """An input or output of the graph."""

    name: str
    type: str
    shape: list[int | str]
    """A symbolic dimension is its name, or "?" if it has none."""


@dataclass(frozen=True)
class Weight:
    """A constant tensor."""

    name: str
    type: str
    """Either "q4nx", or ONNX's name of the type in lower case, such as "float"."""
    shape: list[int]
    """For a Q4NX weight in a graph its rows and columns; in a .q4nx file, which does not record these, the shape of its
    blocks."""
    bytes: int


@dataclass(frozen=True)
class Summary:
    """The report of `flownpu inspect`."""

    path: str
    operators: dict[str, int] = field(default_factory=dict)
    """Number of nodes by "domain:operator", most frequent first; the name of ONNX's own domain is left out."""
    functions: list[str] = field(default_factory=list)
    """Operators that the model defines itself, so that any ONNX Runtime runs them."""
    inputs: list[Value] = field(default_factory=list)
    outputs: list[Value] = field(default_factory=list)
    weights: list[Weight] = field(default_factory=list)
    kv_bytes_per_token: int = 0
    """Bytes that one token takes in the KV cache of all layers."""
    other_graphs: list[str] = field(default_factory=list)
    """The .onnx files beside the decoder's, in a model that takes pictures."""
    manifest: dict[str, Any] = field(default_factory=dict)
    """The folder's flownpu_manifest.json: what the model was made of and with; empty if there is none."""

    @property
    def weight_bytes(self) -> dict[str, int]:
        """Bytes of the weights by type, largest first."""
        total: Counter[str] = Counter()
        for weight in self.weights:
            total[weight.type] += weight.bytes
        return dict(total.most_common())


def summarize(path: Path) -> Summary:
    """Summarises a model folder, an .onnx file or a .q4nx file.

    Raises:
        FlowNPUError: there is no such file, or it is none of these three, or it is damaged.
        MissingDependencyError: onnx_ir is not installed.
    """
    if path.is_dir():
        settings = read_genai_config(path)
        manifest = path / MANIFEST
        summary = _summarize_onnx(
            onnx_path(path, settings),
            head_size=settings["model"]["decoder"].get("head_size") or 0,
            manifest=read_json(manifest) if manifest.is_file() else {},
        )
        return replace(summary, other_graphs=[str(graph) for graph in other_graphs(path, settings)])
    if not path.is_file():
        raise FlowNPUError(f"no such file or folder: {path}")
    if path.suffix == ".onnx":
        return _summarize_onnx(path)
    if path.suffix == ".q4nx":
        return _summarize_q4nx(path)
    raise FlowNPUError(f"expected a model folder, an .onnx file or a .q4nx file, got {path}")


def _summarize_onnx(path: Path, *, head_size: int = 0, manifest: dict[str, Any] | None = None) -> Summary:
    model = load_model(path, purpose="flownpu inspect")
    with reading(path):
        return _summary_of(path, model, head_size, manifest or {})


def _summary_of(path: Path, model: Any, head_size: int, manifest: dict[str, Any]) -> Summary:
    nodes = list(model.graph.all_nodes())
    quantised = _quantised_shapes(nodes)
    return Summary(
        path=str(path),
        operators=dict(Counter(f"{node.domain}:{node.op_type}".lstrip(":") for node in nodes).most_common()),
        functions=sorted({f"{domain}:{name}" for domain, name, _ in model.functions}),
        inputs=[_value(value) for value in model.graph.inputs],
        outputs=[_value(value) for value in model.graph.outputs],
        weights=[_weight(name, value.const_value, quantised) for name, value in model.graph.initializers.items()],
        kv_bytes_per_token=sum(_cache_bytes_per_token(value, head_size) for value in model.graph.inputs),
        manifest=manifest,
    )


def _quantised_shapes(nodes: list[Any]) -> dict[str, list[int]]:
    """Rows and columns of Q4NX weights by name, from the operators that use them: blocks alone may include padding."""
    shapes = {}
    for node in nodes:
        if node.domain == DOMAIN and {"M", "K"} <= node.attributes.keys():
            rows, columns = (node.attributes[name].as_int() for name in ("M", "K"))
            # A gather has its table as input 0, a product its weight as input 1. A gated product's weight holds two
            # matrices of M rows.
            blocks = node.inputs[0 if node.op_type == "Q4NXGather" else 1]
            gating = node.attributes.get("gating")
            gated = gating is not None and gating.as_string() != "none"
            shapes[blocks.name] = [2 * rows if gated else rows, columns]
        elif node.domain == DOMAIN and node.op_type == "Q4NXMoE":
            names = ("num_experts", "hidden_size", "expert_size")
            experts, hidden, inner = (node.attributes[name].as_int() for name in names)
            shapes[node.inputs[2].name] = [experts * 2 * inner, hidden]
            shapes[node.inputs[3].name] = [experts * hidden, inner]
    return shapes


def _value(value: Any) -> Value:
    # onnx_ir has None for a symbolic dimension without a name.
    shape = [dim if isinstance(dim, int) else str(dim.value or "?") for dim in value.shape or ()]
    return Value(value.name, value.dtype.name.lower(), shape)


def _weight(name: str, tensor: Any, quantised: dict[str, list[int]]) -> Weight:
    # The graph has shape and type of a tensor in an external data file: that file is not read.
    if name in quantised:
        return Weight(name, Q4NX, quantised[name], tensor.nbytes)
    return Weight(name, tensor.dtype.name.lower(), list(tensor.shape.numpy()), tensor.nbytes)


def _cache_bytes_per_token(value: Any, head_size: int) -> int:
    """Bytes per token of a cache input [B, G, past length, d], or paged, [blocks, tokens of a block, G, d].

    `head_size` is used where the graph's d is symbolic; 0 if it is not known.
    """
    if not value.name.startswith(CACHE_PREFIX) or value.shape is None or len(value.shape) != 4:
        return 0
    kv_heads, last = next((size for size in value.shape[1:3] if isinstance(size, int)), 0), value.shape[3]
    return int(kv_heads * (last if isinstance(last, int) else head_size) * value.dtype.itemsize)


def _summarize_q4nx(path: Path) -> Summary:
    weights = []
    try:
        with safe_open(path, framework="np") as file:
            for name in file.offset_keys():
                part = file.get_slice(name)
                shape = part.get_shape()
                kind, size = SAFETENSORS_TYPES.get(part.get_dtype(), (part.get_dtype().lower(), 1))
                kind = Q4NX if kind == "int8" and shape[-1:] == [BLOCK_BYTES] else kind
                weights.append(Weight(name, kind, shape, math.prod(shape) * size))
    except SafetensorError as error:
        raise FlowNPUError(f"{path} is not a .q4nx file, or is damaged ({error}): copy or convert it again") from error
    return Summary(path=str(path), weights=weights)
