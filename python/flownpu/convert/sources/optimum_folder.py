# SPDX-License-Identifier: Apache-2.0
"""Converts the folder of an optimum export, a plain ONNX graph, by folding its graph."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from flownpu.convert.checkpoint import read_json
from flownpu.convert.errors import ConversionError
from flownpu.convert.graph.file import GRAPH_FILE, check_data, check_operators, load_graph
from flownpu.convert.output import check_output
from flownpu.convert.sources.attention_folding import prompt_folding
from flownpu.convert.sources.optimum_cache import unlike_the_graph
from flownpu.convert.sources.rewritten_folder import make_rewritten_folder
from flownpu.convert.sources.sentence_files import module_files
from flownpu.graph_rewrites.plain.rewriter import rewrite_plain
from flownpu.model.folder import EXPORTED_GRAPH, template_files
from flownpu.ops.definitions.onnx_function import DOMAIN

if TYPE_CHECKING:
    from pathlib import Path

    from flownpu.convert.request import Request
    from flownpu.graph_rewrites import Report

_log = logging.getLogger(__name__)


def convert_optimum_folder(request: Request) -> None:
    """Folds a plain graph into FlowNPU's operators and quantises its projections; those of 4 or 8 bits keep codes.

    The source is a folder with model.onnx and config.json. All its other files are copied, including those of the
    modules that follow a model of sentence-transformers; the tables of RoPE are made for the context's length. Inputs
    and outputs stay what they are, so that a program that ran the export runs the output: a KV cache is float32 (fp16,
    int8 and a sliding window's cache are refused), and the logits are those of all tokens, whatever the other options
    say. What no rule could fold stays as it is, and is logged as a warning with the reason. Another warning is logged
    if optimum itself feeds a KV cache of another size than the graph takes.

    Raises:
        ConversionError: the source cannot be converted, or the output cannot be written; nothing is left behind.
    """
    check_output(request.output, force=request.force)
    source, options = request.source, request.options
    if options.sliding_window_cache or options.kv_dtype in ("fp16", "int8"):
        raise ConversionError(
            f"{source}: optimum feeds a KV cache in float32 that grows with every token; convert it without "
            "--sliding-window-cache and --kv-dtype"
        )
    path = next((path for path in (source / GRAPH_FILE, source / EXPORTED_GRAPH) if path.is_file()), None)
    if path is None:
        others = ", ".join(sorted(file.name for file in source.glob("*.onnx")))
        raise ConversionError(
            f"{source}: expected {GRAPH_FILE}, a model in one graph, and found {others or 'no ONNX file'}"
        )
    config = read_json(source / "config.json")
    positions = _positions(config, request.context_length, source)
    model = load_graph(path)
    data_files = check_data(model, path)
    if any(node.domain == DOMAIN for node in model.graph):
        raise ConversionError(f"{path}: is a model for FlowNPU already")
    check_operators(model, path)
    if warning := unlike_the_graph(config, model.graph):
        _log.warning("%s: %s", path, warning)
    try:
        report = rewrite_plain(model, positions=positions, tile=prompt_folding)
    except ValueError as error:
        raise ConversionError(f"{path}: the graph is damaged, or of a form that is not known: {error}") from error
    _check_rewritten(path, report, positions)

    copied = [
        file
        for file in sorted(source.iterdir())
        if file.is_file() and file not in data_files and file.suffix != ".onnx"
    ]
    copied += [path for path in (*module_files(source), *template_files(source)) if path not in copied]
    make_rewritten_folder(
        request,
        model,
        report,
        stage="quantise",
        copied=copied,
        read=[path, *data_files],
        texts={},
        source={"kind": "optimum", "model_type": config.get("model_type")},
        settings={"kv_dtype": "fp32", "logits": "all", "context_length": positions or None},
        relative_to="the source's weights",
    )


def _positions(config: dict[str, Any], context_length: int | None, source: Path) -> int:
    """The longest context in tokens: `context_length`, or what config.json says, or 0 if it says nothing."""
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


def _check_rewritten(path: Path, report: Report, positions: int) -> None:
    """Raises ConversionError if no weight was quantised, or RoPE needs a context length; logs what was not folded."""
    left = report.left()
    if not any(report.applied[rule] for rule in ("projection", "q4nx_matmul", "q4nx_dequantized")):
        expected = "expected products with weights in float32, or of 4 or 8 bits"
        raise ConversionError("\n".join([f"{path}: {expected}, and none of them can be used", *left]))
    if report.applied["rotary_embedding"] and positions < 1:
        raise ConversionError(
            f"{path.parent / 'config.json'}: max_position_embeddings is missing; say with --context-length how many "
            "positions the model is for"
        )
    for line in left:
        _log.warning("%s: %s", path, line)
    for attention in report.attentions:
        _log.info("%s: %s: folding level %d, %s", path, attention.node, attention.level, attention.reason)
