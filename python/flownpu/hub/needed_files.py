# SPDX-License-Identifier: Apache-2.0
"""Chooses the files of a repository that a conversion reads, and none of its other forms (.bin, .pth, more graphs)."""

import re
from collections.abc import Iterable

from flownpu.errors import FlowNPUError
from flownpu.hub.reference import Reference

# Settings, the tokenizer, chat templates, and the modules that sentence-transformers runs after the model.
_SETTINGS = re.compile(
    r"[^/]+\.(json|jinja)|vocab\.txt|merges\.txt|sentencepiece\.bpe\.model|additional_chat_templates/[^/]+\.jinja"
    r"|\d+_\w+/(config\.json|model\.safetensors)"
)
_SAFETENSORS = r"model(-\d+-of-\d+)?\.safetensors"
# For each form of a model, in the order in which they are preferred: a file by which it is known, and its weights.
_FORMS = [
    (re.compile(pattern), re.compile(weights))
    for pattern, weights in (
        (_SAFETENSORS, _SAFETENSORS),
        (r"genai_config\.json", r"[^/]+\.onnx([._]data(_\d+)?)?"),
        (r"model\.onnx", r"model\.onnx([._]data(_\d+)?)?"),
        (r"onnx/model\.onnx", r"onnx/model\.onnx([._]data(_\d+)?)?"),
    )
]
# The type of which a repository of GGUF files is downloaded where the name has none, as llama.cpp and Ollama do.
_USUAL_GGUF = "Q4_K_M"
# The files of weights by which an error says what a repository has.
_OTHER_WEIGHTS = re.compile(r".*\.(bin|pth?|safetensors|onnx|msgpack|h5|tflite)")


def needed_files(files: Iterable[str], reference: Reference) -> list[str]:
    """The files that conversion reads, the first of which is a GGUF file if that is the model's form.

    Args:
        files: the paths of all files of the repository.
        reference: the model. If it names no GGUF file, other forms are preferred to these, and among several of these
            one of type Q4_K_M.

    Raises:
        FlowNPUError: the repository has no such file, or none in a form that can be converted.
    """
    files = sorted(files)
    ggufs = [file for file in files if file.endswith(".gguf") and "mmproj" not in file.lower()]
    if reference.gguf:
        return [_gguf_file(ggufs, reference.gguf, reference)]
    for known_by, weights in _FORMS:
        if any(map(known_by.fullmatch, files)):
            return [file for file in files if _SETTINGS.fullmatch(file) or weights.fullmatch(file)]
    if ggufs:
        return ggufs if len(ggufs) == 1 else [_gguf_file(ggufs, _USUAL_GGUF, reference)]
    found = ", ".join(filter(_OTHER_WEIGHTS.fullmatch, files)) or "no weights"
    raise FlowNPUError(
        f"{reference}: expected a repository with model.safetensors, a GGUF file, or a model of ORT GenAI or optimum "
        f"in its first folder; found {found}"
    )


def is_checkpoint(names: Iterable[str]) -> bool:
    """Whether needed files are those of a Hugging Face checkpoint."""
    return any(re.fullmatch(_SAFETENSORS, name) for name in names)


def _gguf_file(ggufs: list[str], wanted: str, reference: Reference) -> str:
    ending = re.compile(rf"(.*[^a-z0-9])?{re.escape(wanted.removesuffix('.gguf'))}(-\d+-of-\d+)?\.gguf", re.IGNORECASE)
    found = [file for file in ggufs if wanted in file.split("/")[-1:]] or [*filter(ending.fullmatch, ggufs)]
    if len(found) == 1:
        return found[0]
    if found and all(re.search(r"-\d+-of-\d+\.gguf$", file) for file in found):
        raise FlowNPUError(f"{reference}: its {len(found)} parts are one model, expected a file that is not split")
    raise FlowNPUError(
        f"{reference}: expected one GGUF file {wanted}, found {len(found) or 'none'}. {reference.repository} has "
        f"{', '.join(ggufs) or 'no GGUF files'}: give a type after a colon, or a file's name"
    )
