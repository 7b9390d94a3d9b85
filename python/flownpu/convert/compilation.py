# SPDX-License-Identifier: Apache-2.0
"""Makes compiled model folders, which keep the form of a model that the provider makes for a session.

ONNX Runtime writes a model in which an EPContext node stands for each partition; the provider writes the partition, as
its device needs it, into a file beside it (ep/context/file.h). Weights that the NPU needs in another order, or that
were repacked from another format, are then read as they are.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flownpu.convert.output import output_folder
from flownpu.errors import FlowNPUError, require
from flownpu.model.folder import MANIFEST, onnx_path, other_graphs, read_genai_config
from flownpu.registration import get_ep_name, register

COMPILED = "model_ctx.onnx"
# Suffixes of the files that the compiled model replaces: the graph and its weights.
_REPLACED = (".onnx", ".data", ".flownpu")


def compile_model(folder: Path, output: Path, options: Mapping[str, str] = {}, *, force: bool = False) -> None:
    """Makes a compiled model folder of a model folder.

    Args:
        folder: a model folder that `flownpu convert` or ORT GenAI's builder wrote.
        output: the folder to make; it appears when it is complete.
        options: options of the provider, added to those in the folder's genai_config.json; the new folder's
            genai_config.json has both.
        force: replace a model that a conversion wrote to `output`.

    Raises:
        FlowNPUError: `folder` is not a model folder, or the provider refuses the model: the message is its own.
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
    """Adds options to the provider's options in the settings of genai_config.json; returns all of them."""
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
    except Exception as error:  # ONNX Runtime's exceptions have no common base class
        raise FlowNPUError(f"{source} cannot be compiled: {error}") from error
    if not target.is_file():
        raise FlowNPUError(f"{source} cannot be compiled: the provider takes none of its nodes")
