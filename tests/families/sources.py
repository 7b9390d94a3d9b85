# SPDX-License-Identifier: Apache-2.0
"""Folders that FlowNPU runs, made of a checkpoint itself, of a GGUF file of it, or of an exporter's model of it.

Each function of SOURCES returns the folder to run, and the exporter's, or None where there is none.
"""

import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from flownpu.convert import convert
from flownpu.errors import FlowNPUError
from tests.convert.conftest import TinyModel
from tests.convert.sources.gguf_files import ARCHITECTURES, OTHER_ARCHITECTURES, add_scaling, write_gguf
from tests.families.checkpoints import for_transformers_4
from tests.rewrites import genai_export, optimum_export

Made = tuple[Path, Path | None]

# Forms that no GGUF file can hold, for llama.cpp's converter writes none.
NO_FILE = {
    "llama with dynamic": "llama.cpp's converter has no such RoPE",
    "olmoe with normalised weights": "such files do not say whether weights are normalised",
    "qwen2 with windows": "such files do not have its windows",
}
_NOT_READ = "`flownpu convert` reads no GGUF files of this family"


class RefusedError(Exception):
    """There is no model to run; the text says which tool refuses it and why."""


def checkpoint(_form: str, tiny: TinyModel, folder: Path) -> Made:
    """Converted from the checkpoint itself."""
    return _converted(tiny.folder, folder / "model"), None


def gguf_file(form: str, tiny: TinyModel, folder: Path) -> Made:
    """Converted from a GGUF file with the weights in Q4_0."""
    config = tiny.reference.config
    if form in NO_FILE:
        raise RefusedError(NO_FILE[form])
    if config.model_type not in ARCHITECTURES | OTHER_ARCHITECTURES:
        raise RefusedError(_NOT_READ)
    before = tiny.reference.model.embed_tokens.weight.clone()
    write_gguf(folder / "model.gguf", tiny.reference, edit=lambda writer: add_scaling(writer, config))
    assert before.equal(tiny.reference.model.embed_tokens.weight), "the file rounds weights"
    return _converted(folder / "model.gguf", folder / "model"), None


def genai_as_it_is(_form: str, tiny: TinyModel, folder: Path, options: tuple[str, ...] = ()) -> Made:
    """The folder that ORT GenAI's builder writes: activations in float32, and int4 in blocks of 32 by default."""
    made = folder.parent / re.sub(r"\W+", "-", "-".join(["genai", *options]))
    if made.is_dir():
        return made, made
    try:
        genai_export.export(genai_export.Export(str(tiny.folder), str(made), ("accuracy_level=0", *options)))
    except RuntimeError as error:
        shutil.rmtree(made, ignore_errors=True)
        raise RefusedError(f"its builder fails ({_last_line(error)})") from error
    return made, made


def genai_converted(form: str, tiny: TinyModel, folder: Path, options: tuple[str, ...] = ()) -> Made:
    """The folder of ORT GenAI's builder, converted."""
    export, _ = genai_as_it_is(form, tiny, folder, options)
    return _converted(export, folder / "model", logits="last"), export


def optimum(_form: str, tiny: TinyModel, folder: Path) -> Made:
    """Converted from what optimum exports."""
    copy = shutil.copytree(tiny.folder, folder / "checkpoint")
    for_transformers_4(copy)
    try:
        arguments = {"checkpoint": copy, "output": folder / "export"}
        optimum_export.call(optimum_export.environment(), "export_checkpoint", **arguments)
    except optimum_export.ExporterError as error:
        raise RefusedError(f"optimum fails ({_last_line(error)})") from error
    return _converted(folder / "export", folder / "model"), folder / "export"


SOURCES: dict[str, Callable[[str, TinyModel, Path], Made]] = {
    "checkpoint": checkpoint,
    "GGUF": gguf_file,
    "GenAI, as it is": genai_as_it_is,
    "GenAI, converted": genai_converted,
    "optimum": optimum,
}
# The option that keeps an embedding and a head apart that are one weight; without it, the builder writes models that
# ONNX Runtime does not load (zero points or 8 bits by its default algorithm), or fails (QDQ).
_APART = "shared_embeddings=false"
# Recipes of GenAI's builder: names on the page, and its options.
RECIPES: dict[str, tuple[str, ...]] = {
    "int4 (the default)": (),
    "int4 with zero points": ("is_symmetric=false", _APART),
    "rtn": ("algo_config=rtn",),
    "rtn_last": ("algo_config=rtn_last",),
    "k_quant": ("algo_config=k_quant",),
    "k_quant_mixed": ("algo_config=k_quant_mixed",),
    "k_quant_last": ("algo_config=k_quant_last",),
    "8-bit head": ("matmul_mixed_precision=last_matmul:int8", _APART),
    "int8": ("precision=int8", _APART),
    "QDQ": ("use_qdq=true", _APART),
}
# Forms that represent the others: windows, scaled embeddings; a head of its own; fused projections, LongRoPE; norms of
# queries and keys. The embeddings of Gemma 3 and Qwen 3 are their heads.
RECIPE_FORMS = ("gemma3_text", "llama", "phi3 with longrope", "qwen3")
# The builder's k_quant fails at rows of an odd number of blocks.
RECIPE_SIZES = {"hidden_size": 256, "num_attention_heads": 8, "intermediate_size": 640}
RECIPE_SOURCES: dict[str, Callable[[str, TinyModel, Path], Made]] = {
    f"{recipe}, {how}": partial(source, options=options)
    for recipe, options in RECIPES.items()
    for how, source in (("as it is", genai_as_it_is), ("converted", genai_converted))
}
# The longest texts of these sources: a model from them has no window, or only one table of RoPE, and computes other
# results than the checkpoint with longer texts.
WITHIN = {
    ("mistral", "GGUF"): "its window",
    ("mistral", "GenAI, as it is"): "its window",
    ("phi3", "GenAI, as it is"): "its window",
    ("phi3 as phi4-mini", "optimum"): "its first context",
    ("phi3 with longrope", "optimum"): "its first context",
}


def _converted(source: Path, output: Path, **options: Any) -> Path:
    try:
        convert(source, output, **options)
    except FlowNPUError as error:
        raise RefusedError(told(str(error))) from error
    return output


def told(text: str) -> str:
    """The first line of a message, without the paths of this run."""
    line = re.sub(r"(/[^\s:'\"]+)+", lambda found: found[0].rsplit("/", 1)[-1], text.strip().splitlines()[0])
    return line.replace("|", ", ")


def _last_line(error: Exception) -> str:
    """The last line of a program's output that names an error."""
    lines = str(error).strip().splitlines()
    line = told(next((line for line in reversed(lines) if re.match(r"\w*(Error|Exception): ", line)), lines[-1]))
    # optimum's message goes on with advice.
    return line.partition(", but no custom")[0]
