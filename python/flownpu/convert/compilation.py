# SPDX-License-Identifier: Apache-2.0
"""Compiled model folders: what the provider makes of a model when a session is made, kept for the next sessions.

ONNX Runtime writes a model in which an EPContext node stands for each partition; the provider writes the partition, as
its device wants it, into a file beside it (ep/context/file.h). What the NPU needs in an order of its own, and what was
repacked from another format, is then read as it is.
"""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

from flownpu.convert.output import output_folder
from flownpu.errors import FlowNPUError, require
from flownpu.model.folder import MANIFEST, onnx_path, other_graphs, read_genai_config
from flownpu.registration import get_ep_name, register

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

__all__ = ["compile_model"]

COMPILED = "model_ctx.onnx"
# What the compiled model stands for: its graph, with the weights.
_REPLACED = (".onnx", ".data", ".flownpu")


def compile_model(folder: Path, output: Path, options: Mapping[str, str] = {}, *, force: bool = False) -> None:
    """Makes a compiled model folder of a model folder.

    Args:
        folder: what `flownpu convert` or ORT GenAI's builder wrote.
        output: the folder to make; it appears when it is complete.
        options: of the provider, beside those that the folder's genai_config.json names; they are written there.
        force: replace a model that is there.

    Raises:
        FlowNPUError: the folder is none, or the provider does not take the model: its own words.
        ConversionError: `output` exists, or cannot be written.
    """
    onnxruntime = require("onnxruntime", extra="genai", purpose="flownpu compile")
    settings = read_genai_config(folder)
    if others := other_graphs(folder, settings):
        names = " and ".join(path.name for path in others)
        raise FlowNPUError(f"{folder} has {names} beside its decoder; only models of one graph can be compiled")
    chosen = _choose(settings, options)
    source = onnx_path(folder, settings)
    size = sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
    register()
    with output_folder(output, force=force, size=size) as temporary:
        for path in folder.iterdir():
            if path.is_file() and path.suffix not in _REPLACED:
                shutil.copy(path, temporary / path.name)
        _compile(onnxruntime, source, temporary / COMPILED, chosen)
        settings["model"]["decoder"]["filename"] = COMPILED
        (temporary / "genai_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
        manifest = {"format": 1, "source": {"compiled": source.name}, "settings": chosen}
        (temporary / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


def _choose(settings: dict[str, Any], options: Mapping[str, str]) -> dict[str, str]:
    """The provider's options, put into the settings."""
    session = settings["model"]["decoder"].setdefault("session_options", {})
    entries = session.setdefault("provider_options", [])
    for entry in entries:
        if get_ep_name() in entry:
            entry[get_ep_name()].update(options)
            return dict(entry[get_ep_name()])
    entries.append({get_ep_name(): dict(options)})
    return dict(options)


def _compile(onnxruntime: Any, source: Path, target: Path, options: dict[str, str]) -> None:
    session = onnxruntime.SessionOptions()
    devices = [device for device in onnxruntime.get_ep_devices() if device.ep_name == get_ep_name()]
    session.add_provider_for_devices(devices[:1], options)
    try:
        onnxruntime.ModelCompiler(session, str(source)).compile_to_file(str(target))
    except Exception as error:  # ORT has several, without a common base
        raise FlowNPUError(f"{source} cannot be compiled: {error}") from error
    if not target.is_file():
        raise FlowNPUError(f"{source} cannot be compiled: the provider takes none of its nodes")
