# SPDX-License-Identifier: Apache-2.0
"""Converts the folder of an optimum export (a plain ONNX graph, float32) by folding its graph."""

from __future__ import annotations

import logging
import shutil
from typing import TYPE_CHECKING, Any

from flownpu.aie.cost.attention_tiler import AttentionShape, tile_attention
from flownpu.aie.cost.device import DEVICES
from flownpu.convert.checkpoint import read_json
from flownpu.convert.data_file import aligned
from flownpu.convert.errors import ConversionError
from flownpu.convert.graph_file import GRAPH_FILE, SMALL_FILES, check_data, load_graph, save_graph, tensors
from flownpu.convert.manifest import sha256, write_manifest
from flownpu.convert.output import check_output, output_folder
from flownpu.convert.progress import Stage, silent
from flownpu.graph_rewrites.plain_rewriter import rewrite_plain
from flownpu.ops.onnx_function import DOMAIN

if TYPE_CHECKING:
    from pathlib import Path

    import onnx_ir as ir

    from flownpu.convert.model_writer import ModelOptions
    from flownpu.convert.progress import ProgressCallback
    from flownpu.graph_rewrites import Report
    from flownpu.graph_rewrites.report import AttentionGeometry

__all__ = ["convert_optimum_folder", "folding_level"]

_PACKAGES = ("flownpu", "ml_dtypes", "numpy", "onnx", "onnx-ir", "onnxscript")
# Domains whose operators ONNX Runtime has.
_KNOWN_DOMAINS = {"", "ai.onnx", "com.microsoft"}
# Tokens of a call that a folding level is told for where the graph does not say how many there are: the prompt of the
# measurements (docs/performance.md).
_NOMINAL_TOKENS = 1024

_log = logging.getLogger(__name__)


def convert_optimum_folder(
    source: Path,
    output: Path,
    options: ModelOptions,
    *,
    context_length: int | None = None,
    force: bool = False,
    progress: ProgressCallback = silent,
) -> None:
    """Folds a plain graph into FlowNPU's operators and quantises its projections.

    Inputs and outputs stay what they are, so that what ran the export runs the output: a KV cache is in float32, and
    the logits are those of all tokens, whatever the options' defaults are for other sources. What no rule could fold
    stays as it is, and is logged as a warning with the reason.

    Args:
        source: folder with model.onnx and config.json.
        output: folder to make; all other files of the source are copied.
        options: a KV cache of another type than float32, or of a window's size, is refused.
        context_length: positions that the tables of RoPE are made for; None: as many as config.json allows.
        force: replace a model that is at `output`.
        progress: hears how far it is.

    Raises:
        ConversionError: the source cannot be converted, or the output not be written; nothing is left behind.
    """
    check_output(output, force=force)
    if options.sliding_window_cache or options.kv_dtype == "fp16":
        raise ConversionError(
            f"{source}: optimum feeds a KV cache in float32 that grows with every token; convert it without "
            "--sliding-window-cache and --kv-dtype"
        )
    path = source / GRAPH_FILE
    if not path.is_file():
        others = ", ".join(sorted(file.name for file in source.glob("*.onnx")))
        raise ConversionError(
            f"{source}: expected {GRAPH_FILE}, a model in one graph, and found {others or 'no ONNX file'}"
        )
    config = read_json(source / "config.json")
    positions = _positions(config, context_length, source)
    model = load_graph(path)
    data_files = check_data(model, path)
    _check_domains(model, path)
    try:
        report = rewrite_plain(model, positions=positions, tile=folding_level)
    except ValueError as error:
        raise ConversionError(f"{path}: the graph is damaged, or of a form that is not known: {error}") from error
    _check_rewritten(path, report, positions)

    copied = [
        file
        for file in sorted(source.iterdir())
        if file.is_file() and file not in data_files and file.suffix != ".onnx"
    ]
    read = [path, *data_files, *copied]
    size = sum(aligned(tensor.nbytes) for tensor in tensors(model)) + SMALL_FILES
    with output_folder(output, force=force, size=size + sum(file.stat().st_size for file in copied)) as folder:
        errors = save_graph(model, folder, progress, stage="quantise")
        for file in copied:
            shutil.copyfile(file, folder / file.name)
        written = sum(file.stat().st_size for file in folder.iterdir())
        counter = Stage(progress, "sum", written + sum(file.stat().st_size for file in read), "B")
        write_manifest(
            folder,
            source={
                "kind": "optimum",
                "model_type": config.get("model_type"),
                "name": source.resolve().name,
                "files": {file.name: {"sha256": sha256(file, counter.advance)} for file in read},
            },
            settings={"kv_dtype": "fp32", "logits": "all", "context_length": positions or None},
            quantisation={
                "format": "q4nx",
                "relative_to": "the source's float32 weights",
                "relative_error": errors,
                "rewrites": report.to_json(),
            },
            packages=_PACKAGES,
            advance=counter.advance,
        )


def folding_level(geometry: AttentionGeometry) -> tuple[int, str]:
    """How much of an attention a call on XDNA 2 computes, and why not more (Zen-Attention, section III.B)."""
    tokens = geometry.tokens or _NOMINAL_TOKENS
    tiling = tile_attention(
        AttentionShape(
            heads=geometry.heads,
            kv_heads=geometry.kv_heads,
            d=geometry.head_size,
            queries=tokens,
            keys=tokens,
            window=geometry.window if geometry.window > 0 else None,
            causal=geometry.causal,
            bias=geometry.biased,
        ),
        DEVICES["kraken-350"],
    )
    return tiling.level, f"{tokens} tokens: {tiling.reason}"


def _positions(config: dict[str, Any], context_length: int | None, source: Path) -> int:
    """The longest context; 0 if config.json does not say one."""
    largest = config.get("max_position_embeddings", 0)
    if not isinstance(largest, int):
        raise ConversionError(
            f"{source / 'config.json'}: expected max_position_embeddings to be a number, got {largest}"
        )
    if context_length is None:
        return largest
    if largest and not 1 <= context_length <= largest:
        raise ConversionError(f"{source}: expected a context length of 1 to {largest}, got {context_length}")
    return context_length


def _check_domains(model: ir.Model, path: Path) -> None:
    if any(node.domain == DOMAIN for node in model.graph):
        raise ConversionError(f"{path}: is a model for FlowNPU already")
    unknown = sorted(
        {
            f"{node.domain}.{node.op_type}"
            for node in model.graph.all_nodes()
            if node.domain not in _KNOWN_DOMAINS and node.op_identifier() not in model.functions
        }
    )
    if unknown:
        raise ConversionError(
            f"{path}: {', '.join(unknown)}: operators that ONNX Runtime does not have; export the model without them"
        )


def _check_rewritten(path: Path, report: Report, positions: int) -> None:
    """Raises ConversionError if no weight was quantised; logs what was left."""
    left = report.left()
    if not report.applied["projection"]:
        raise ConversionError(
            "\n".join([f"{path}: expected products with float32 weights, and none of them can be used", *left])
        )
    if report.applied["rotary_embedding"] and positions < 1:
        raise ConversionError(
            f"{path.parent / 'config.json'}: max_position_embeddings is missing; say with --context-length how many "
            "positions the model is for"
        )
    for line in left:
        _log.warning("%s: %s", path, line)
    for attention in report.attentions:
        _log.info("%s: %s: folding level %d, %s", path, attention.node, attention.level, attention.reason)
