# SPDX-License-Identifier: Apache-2.0
"""Makes the folder of a model whose graph was rewritten."""

from __future__ import annotations

import logging
import shutil
from typing import TYPE_CHECKING, Any

import onnx_ir as ir

from flownpu import _native
from flownpu.convert.graph.data_file import aligned
from flownpu.convert.graph.file import SMALL_FILES, save_graph, tensors
from flownpu.convert.manifest import write_manifest
from flownpu.convert.output import output_folder
from flownpu.graph_rewrites.q4nx_tensor import Q4NXTensor
from flownpu.ops import q4nx

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from flownpu.convert.request import Request
    from flownpu.graph_rewrites import Report

_PACKAGES = ("flownpu", "ml_dtypes", "numpy", "onnx", "onnx-ir", "onnxscript")

_GRAPH = ir.AttributeType.GRAPH
_log = logging.getLogger(__name__)


def make_rewritten_folder(
    request: Request,
    model: ir.Model,
    report: Report,
    *,
    stage: str,
    copied: Sequence[Path],
    read: Sequence[Path],
    texts: Mapping[str, str],
    source: Mapping[str, Any],
    settings: Mapping[str, Any],
    relative_to: str,
) -> None:
    """Packs the weights, writes the graph, the files beside it and the manifest.

    Args:
        request: the source, the output, and the progress callback.
        model: the model that `graph_rewrites` has rewritten.
        report: the report of that rewriting.
        stage: what is done to the weights: "repack" or "quantise".
        copied: files of the source that are copied to the same places in the output.
        read: the source's other files that were read; the manifest has the checksums of these and of `copied`.
        texts: further files of the output, by name; one may replace a copied file.
        source: the manifest's entries on the source, except its files.
        settings: the manifest's entries on the options.
        relative_to: what the manifest says the weights' errors are relative to.

    Raises:
        ConversionError: a weight is damaged, or the output cannot be written; nothing is left behind.
    """
    again = _say_quantised_again(model)
    _say_not_run(model, request)
    size = sum(aligned(tensor.nbytes) for tensor in tensors(model)) + SMALL_FILES
    size += sum(file.stat().st_size for file in copied)
    with output_folder(request.output, force=request.force, size=size) as folder:
        errors = save_graph(model, folder, request.progress, source=request.source, stage=stage)
        for file in copied:
            place = folder / file.relative_to(request.source)
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, place)
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
        write_manifest(
            folder,
            source={**source, "name": request.name},
            read={file.relative_to(request.source).as_posix(): file for file in [*read, *copied]},
            settings=settings,
            quantisation={
                "format": "q4nx",
                "relative_to": relative_to,
                "relative_error": errors,
                **again,
                "rewrites": report.to_json(),
            },
            packages=_PACKAGES,
            progress=request.progress,
        )


def _say_not_run(model: ir.Model, request: Request) -> None:
    """Warns about operators that no device of FlowNPU runs, with the remedy: a session would refuse the model."""
    known = {(contract.domain, contract.op_type) for contract in _native.contracts()} | {("", "Constant")}
    constant: set[ir.Value | None] = {None, *model.graph.initializers.values()}
    found: dict[str, list[str]] = {}
    for node in model.graph:
        has_graphs = any(attribute.type == _GRAPH for attribute in node.attributes.values())
        if constant.issuperset(node.inputs) and not has_graphs:
            constant.update(node.outputs)  # ONNX Runtime computes these operators when the session is made
        elif (node.domain, node.op_type) not in known or (has_graphs and not _is_choice(node)):
            found.setdefault(node.op_type, []).append(str(node.name))
    for operator, names in found.items():
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        _log.warning(
            "%s: FlowNPU does not run %s (%s%s): `flownpu run` and sessions want --option on_unsupported=cpu, which "
            "leaves it to ONNX Runtime",
            request.output,
            operator,
            names[0],
            more,
        )


def _is_choice(node: ir.Node) -> bool:
    """Whether all subgraphs of a node, if it has any, hold constants alone: devices run an If between constants."""
    graphs = [attribute.as_graph() for attribute in node.attributes.values() if attribute.type == _GRAPH]
    return all(inner.op_type == "Constant" for graph in graphs for inner in graph) and all(
        ir.convenience.get_const_tensor(value) is not None for graph in graphs for value in graph.outputs
    )


def _say_quantised_again(model: ir.Model) -> dict[str, Any]:
    """Warns if weights could not keep their codes; returns that text for the manifest, or {} if all kept them."""
    count = sum(isinstance(tensor, Q4NXTensor) and not tensor.keeps_codes for tensor in tensors(model))
    if not count:
        return {}
    text = (
        f"{count} {'weight' if count == 1 else 'weights'}: dequantised, and quantised again to Q4NX, whose groups are "
        f"{q4nx.GROUP} columns"
    )
    _log.warning("block_size=%d: %s", _native.SMALL_BLOCK, text)
    return {"weights": {f"block_size={_native.SMALL_BLOCK}": text}}
