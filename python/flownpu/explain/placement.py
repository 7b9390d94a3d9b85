# SPDX-License-Identifier: Apache-2.0
"""Finds the place of each node of a model: makes a session with `on_unsupported=cpu` and asks it; runs nothing."""

import json
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flownpu.errors import require
from flownpu.registration import get_ep_name, register

# Values of `Place.place`; for nodes of any other provider it is the provider's name.
DEVICE, HOST, CPU, FOLDED = "flownpu", "host", "cpu", "folded"

# Operators that compute a whole attention.
_ATTENTIONS = {
    "Attention",
    "FlowKVAttention",
    "FlowQKVAttention",
    "GroupQueryAttention",
    "MultiHeadAttention",
    "PagedAttention",
}
_CPU_PROVIDER = "CPUExecutionProvider"
_FOLDED_REASON = "ONNX Runtime computes it when the session is made, or merged it with others"
_INLINED_REASON = "replaced by its definition, whose nodes run on ONNX Runtime's CPU provider"
# Exporters number layers in the names of nodes: "/model/layers.3/attn", "/encoder/layer.3/", "/blocks.3/", "/h.3/".
_LAYER = re.compile(r"(?:^|[/._])(?:layers?|blocks?|h)[./_](\d+)(?=$|[/._])")


@dataclass(frozen=True)
class Place:
    """Where one node runs.

    Attributes:
        node: the node's name.
        operator: "domain:operator"; the name of ONNX's own domain is left out.
        layer: the number of the layer that its name puts it in; None: no layer.
        place: "flownpu" (the device), "host" (FlowNPU, on the device's host), "cpu" (ONNX Runtime's CPU provider),
            "folded" (nowhere: there is nothing left to run), or another provider's name.
        reason: why it does not run on the device; empty if it does.
    """

    node: str
    operator: str
    layer: int | None
    place: str
    reason: str = ""


@dataclass(frozen=True)
class Placement:
    """Where all nodes of a graph run.

    Attributes:
        summary: the provider's own line: nodes, share of multiply-adds, the device and why it was chosen.
        device: the device's description.
        nodes: the file's nodes in their order, those of bodies after their If, Loop or Scan; then those that ONNX
            Runtime made when it optimised the graph.
        whole_prompts: for each partition that computes long prompts at once, the reason.
    """

    summary: str
    device: str
    nodes: tuple[Place, ...]
    whole_prompts: tuple[str, ...]

    def count(self) -> dict[str, int]:
        """How many nodes run in each place, the device first."""
        counts = {DEVICE: 0}
        for node in self.nodes:
            counts[node.place] = counts.get(node.place, 0) + 1
        return counts


def place_nodes(path: Path, graph: Any, options: Mapping[str, str]) -> Placement:
    """Makes a session of an .onnx file on FlowNPU's provider, and reads from it what runs where.

    Args:
        path: the file.
        graph: the file's graph (onnx_ir.Graph).
        options: options of FlowNPU's provider, such as {"device": "cpu"}.

    Raises:
        MissingDependencyError: onnxruntime is not installed.
        RuntimeError: ONNX Runtime or the provider refuses the model or an option; the message is theirs.
    """
    onnxruntime = require("onnxruntime", extra="genai", purpose="flownpu explain")
    register()
    session_options = onnxruntime.SessionOptions()
    session_options.log_severity_level = 3  # only errors are logged: the report has the content of warnings
    session_options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    with tempfile.TemporaryDirectory(prefix="flownpu-") as scratch:
        file = Path(scratch) / "placement.json"
        session = onnxruntime.InferenceSession(
            str(path),
            session_options,
            providers=[get_ep_name()],
            provider_options=[{**options, "on_unsupported": "cpu", "placement": str(file)}],
        )
        report = json.loads(file.read_text(encoding="utf-8"))
    assigned = {
        node.name: (part.ep_name, _operator(node.domain, node.op_type))
        for part in session.get_provider_graph_assignment_info()
        for node in part.get_nodes()
    }
    return Placement(
        report["summary"], report["device"], tuple(_places(graph, assigned, report)), tuple(report["whole_prompts"])
    )


def layer_of(node: str) -> int | None:
    """The layer that a node's name puts it in: 3 for "/model/layers.3/mlp/Mul", None for "/model/norm"."""
    found = _LAYER.search(node)
    return int(found[1]) if found else None


def _places(graph: Any, assigned: dict[str, tuple[str, str]], report: dict[str, Any]) -> list[Place]:
    reasons, on_host, inlined = (_reasons(report[kind]) for kind in ("left", "on_host", "inlined"))
    reasons |= _reasons(report["control_flow"])
    places, seen = [], set()
    for node in graph.all_nodes():
        if node.op_type == "Constant":  # a value, which is not computed
            continue
        name = node.name or ""
        seen.add(name)
        operator = _operator(node.domain, node.op_type)
        if name in inlined:
            places.append(Place(name, operator, layer_of(name), CPU, f"{inlined[name]}; {_INLINED_REASON}"))
        elif name in assigned:
            places.append(_assigned(name, operator, assigned[name][0], on_host, reasons))
        else:
            places.append(Place(name, operator, layer_of(name), FOLDED, _FOLDED_REASON))
    made = [
        _assigned(name, operator, provider, on_host, reasons)
        for name, (provider, operator) in assigned.items()
        if name not in seen
    ]
    return [*_numbered(places), *made]


def _numbered(places: list[Place]) -> list[Place]:
    """The places with layers; if no node's name has one, a layer begins at each attention."""
    if any(place.layer is not None for place in places):
        return places
    seen, numbered = -1, []
    for place in places:
        seen += place.operator.rpartition(":")[2] in _ATTENTIONS
        numbered.append(replace(place, layer=seen) if seen >= 0 else place)
    return numbered


def _assigned(name: str, operator: str, provider: str, on_host: dict[str, str], reasons: dict[str, str]) -> Place:
    if name in on_host:
        return Place(name, operator, layer_of(name), HOST, on_host[name])
    if provider == get_ep_name():
        return Place(name, operator, layer_of(name), DEVICE)
    place = CPU if provider == _CPU_PROVIDER else provider
    return Place(name, operator, layer_of(name), place, reasons.get(name, ""))


def _reasons(items: list[dict[str, str]]) -> dict[str, str]:
    """The reason for each node's name, without that name, so that nodes with one cause have one text."""
    return {_name(item["node"]): item["reason"].removeprefix(f"[{item['node']}] ") for item in items}


def _name(node: str) -> str:
    """The node's name in the provider's description, such as "Sin 'rope/Sin'"."""
    _, quote, rest = node.partition("'")
    return rest.removesuffix("'") if quote else node


def _operator(domain: str, op_type: str) -> str:
    return f"{domain}:{op_type}".lstrip(":")
