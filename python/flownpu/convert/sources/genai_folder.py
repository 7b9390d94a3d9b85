# SPDX-License-Identifier: Apache-2.0
"""Converts an ORT GenAI model folder with int4 weights into one for FlowNPU, by rewriting its graph."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any

import onnx_ir as ir

from flownpu.convert.checkpoint import read_json
from flownpu.convert.errors import ConversionError
from flownpu.convert.graph.file import GRAPH_FILE, check_data, check_operators, load_graph
from flownpu.convert.output import check_output
from flownpu.convert.quick_tokenizer import TOKENIZER, quick_tokenizer
from flownpu.convert.sources.huggingface import tokenizer_paths
from flownpu.convert.sources.rewritten_folder import make_rewritten_folder
from flownpu.errors import FlowNPUError
from flownpu.graph_rewrites import rewrite
from flownpu.graph_rewrites.node import PAST_KEY, attribute_int
from flownpu.graph_rewrites.sliding_window_cache import set_windows, windows
from flownpu.model.folder import check_genai_config, onnx_path
from flownpu.ops.definitions.kv_dtypes import cache_columns
from flownpu.ops.definitions.onnx_function import DOMAIN
from flownpu.registration import get_ep_name

if TYPE_CHECKING:
    from pathlib import Path

    from flownpu.convert.model_writer import ModelOptions
    from flownpu.convert.request import Request
    from flownpu.graph_rewrites import Report

_log = logging.getLogger(__name__)


def convert_genai_folder(request: Request) -> None:
    """Rewrites a GenAI model for FlowNPU. Weights keep their 4-bit codes (unless in blocks of 16); scales become bf16.

    What no rule could rewrite stays as it is, and is logged as a warning with the reason.

    The source is a folder with genai_config.json, the ONNX model it names, and a tokenizer.

    Raises:
        ConversionError: the source cannot be converted, or the output cannot be written; nothing is left behind.
    """
    check_output(request.output, force=request.force)
    source, options = request.source, request.options
    config = read_json(source / "genai_config.json")
    try:
        check_genai_config(source / "genai_config.json", config)
    except FlowNPUError as error:
        raise ConversionError(str(error)) from error
    path = _graph_path(source, config)
    model = load_graph(path)
    data_files = check_data(model, path)
    check_operators(model, path)
    try:
        _complete_windows(path, config, model)
        report = rewrite(
            model,
            kv_dtype=options.kv_dtype,
            logits=options.logits,
            sliding_window_cache=options.sliding_window_cache,
        )
    except ValueError as error:
        raise ConversionError(f"{path}: the graph is damaged, or not one of ORT GenAI's: {error}") from error
    _check_rewritten(path, report)
    config = _edited(config, source, model, options, request.context_length)
    texts = {"genai_config.json": json.dumps(config, indent=4) + "\n"}
    copied = tokenizer_paths(source)
    if source / TOKENIZER in copied:
        texts[TOKENIZER] = quick_tokenizer((source / TOKENIZER).read_bytes()).decode()
    make_rewritten_folder(
        request,
        model,
        report,
        stage="repack",
        copied=copied,
        read=[source / "genai_config.json", path, *data_files],
        texts=texts,
        source={"kind": "genai", "model_type": config["model"].get("type")},
        settings={**options.as_dict(), "context_length": config["model"].get("context_length")},
        relative_to="the source's 4-bit and 8-bit weights",
    )


def _graph_path(source: Path, config: dict[str, Any]) -> Path:
    """The ONNX file of a model that consists of one decoder.

    Raises:
        ConversionError: the model has other parts, or the file is missing.
    """
    model = config.get("model")
    decoder = model.get("decoder") if isinstance(model, dict) else None
    if not isinstance(model, dict) or not isinstance(decoder, dict):
        raise ConversionError(f"{source / 'genai_config.json'}: expected a language model with model.decoder")
    parts = sorted(name for name, part in model.items() if isinstance(part, dict) and name != "decoder")
    if "pipeline" in decoder:
        parts.append("decoder.pipeline")
    if parts:
        raise ConversionError(
            f"{source}: the model has parts that cannot be converted ({', '.join(parts)}); export its decoder alone, "
            "or convert the checkpoint it was made of"
        )
    path = onnx_path(source, config)
    if not path.is_file():
        raise ConversionError(f"{path}: genai_config.json names this file, and it is missing")
    return path


def _complete_windows(path: Path, config: dict[str, Any], model: ir.Model) -> None:
    """Puts windows that only genai_config.json has into the graph, and logs a warning if there are any.

    Raises:
        ValueError: genai_config.json names layers that the graph does not have.
    """
    cache = config["model"]["decoder"].get("sliding_window") or {}
    window = cache.get("window_size", -1)
    if cache.get("slide_key_value_cache", True) or window < 1:
        return  # GenAI itself cuts the cache to the window, or there is no window
    if layers := set_windows(model, window, cache.get("layers", [])):
        _log.warning(
            "%s: the graph lets %d layers see all tokens, and genai_config.json gives their caches a window of %d: "
            "they see that now",
            path,
            len(layers),
            window,
        )


def _check_rewritten(path: Path, report: Report) -> None:
    """Raises ConversionError if nothing was rewritten; logs what was left."""
    left = report.left()
    if not report.applied["q4nx_matmul"] and not report.applied["q4nx_dequantized"]:
        if any(domain == DOMAIN for domain, _ in report.before):
            raise ConversionError(f"{path}: is a model for FlowNPU already")
        expected = "expected weights of 4 or 8 bits (MatMulNBits, DequantizeLinear)"
        raise ConversionError("\n".join([f"{path}: {expected}, and none of them can be used", *left]))
    for line in left:
        _log.warning("%s: %s", path, line)


def _set_cache_columns(decoder: dict[str, Any], model: ir.Model) -> None:
    """Sets head_size to the row length of an int8 cache, which is longer than a head: GenAI only allocates by it."""
    for node in model.graph:
        if (node.domain, node.op_type) == (DOMAIN, "FlowQKVAttention"):
            past = node.inputs[PAST_KEY]
            if past is not None and past.dtype == ir.DataType.INT8:
                decoder["head_size"] = cache_columns(past.dtype, attribute_int(node, "head_size"))
                return


def _edited(
    config: dict[str, Any], source: Path, model: ir.Model, options: ModelOptions, context_length: int | None
) -> dict[str, Any]:
    """The output's genai_config.json: FlowNPU's provider, the new file and caches; all else as in the source."""
    config = json.loads(json.dumps(config))
    settings = config["model"]
    decoder = settings["decoder"]
    decoder["filename"] = GRAPH_FILE
    decoder.setdefault("session_options", {})["provider_options"] = [{get_ep_name(): {}}]
    _set_cache_columns(decoder, model)
    section = decoder.get("sliding_window") or {}
    windowed = windows(model)
    if options.sliding_window_cache and windowed:
        decoder["sliding_window"] = {
            **section,
            "window_size": max(windowed.values()),
            # The operator evicts old tokens from the cache (sliding_window_cache=1); GenAI only allocates it, and must
            # not split prompts.
            "slide_key_value_cache": False,
            "slide_inputs": False,
            "layers": list(windowed),
        }
    elif not section.get("slide_key_value_cache", True):
        del decoder["sliding_window"]
    if context_length is not None:
        largest = settings.get("context_length", context_length)
        if not 1 <= context_length <= largest:
            raise ConversionError(f"{source}: expected a context length of 1 to {largest}, got {context_length}")
        settings["context_length"] = context_length
        search = config.setdefault("search", {})
        search["max_length"] = min(search.get("max_length", context_length), context_length)
    return dict(config)
