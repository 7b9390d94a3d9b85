# SPDX-License-Identifier: Apache-2.0
"""Finds the files of sentence-transformers in a checkpoint, which say how hidden states become an embedding."""

import json
from pathlib import Path, PurePosixPath
from typing import Any

from flownpu.convert.checkpoint import read_json
from flownpu.convert.errors import ConversionError
from flownpu.convert.quick_tokenizer import TOKENIZER, quick_tokenizer
from flownpu.model.folder import MODULES

_ROOT = (
    MODULES,
    "config_sentence_transformers.json",
    "sentence_bert_config.json",
    "config.json",
    TOKENIZER,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.txt",
    "vocab.json",
    "merges.txt",
    "sentencepiece.bpe.model",
)
# The files in a module's folder: its settings and its weights.
_OF_MODULE = ("config.json", "model.safetensors")


def has_modules(source: Path) -> bool:
    """Whether a checkpoint has sentence-transformers' list of modules, which make embeddings of hidden states."""
    return (source / MODULES).is_file()


def sentence_files(source: Path) -> dict[str, bytes]:
    """The contents of the files that are copied to the model's folder, by path relative to the folder.

    tokenizer.json becomes one that is read faster. In tokenizer_config.json padding_side becomes "right", where the
    converted graphs need the padding.

    Raises:
        ConversionError: tokenizer.json is missing, or modules.json is not as sentence-transformers writes it.
    """
    if not (source / TOKENIZER).is_file():
        raise ConversionError(
            f"{source}: tokenizer.json is missing, by which texts become tokens; download it, or save it with "
            "AutoTokenizer.from_pretrained(...).save_pretrained(...)"
        )
    paths = [path for name in _ROOT if (path := source / name).is_file()] + module_files(source)
    files = {path.relative_to(source).as_posix(): path.read_bytes() for path in paths}
    files[TOKENIZER] = quick_tokenizer(files[TOKENIZER])
    settings = "tokenizer_config.json"
    if settings in files and (tokenizer := read_json(source / settings)).get("padding_side", "right") != "right":
        text = json.dumps({**tokenizer, "padding_side": "right"}, indent=2, ensure_ascii=False)
        files[settings] = f"{text}\n".encode()
    return files


def module_files(source: Path) -> list[Path]:
    """The files of the modules that follow the transformer, each of which has a folder.

    Raises:
        ConversionError: modules.json is not as sentence-transformers writes it.
    """
    paths = [source / folder / name for folder in _folders(source) for name in _OF_MODULE]
    return [path for path in paths if path.is_file()]


def _folders(source: Path) -> list[str]:
    """The folders of all modules except the first, which is the checkpoint itself."""
    path = source / MODULES
    if not path.is_file():
        return []
    try:
        modules: Any = json.loads(path.read_text(encoding="utf-8"))
        folders = [str(module["path"]) for module in modules]
    except (ValueError, TypeError, KeyError) as error:
        raise ConversionError(
            f"{path}: expected a list of modules, each with its path, as sentence-transformers writes it, got {error}"
        ) from error
    for folder in folders:
        place = PurePosixPath(folder)
        if place.is_absolute() or ".." in place.parts or "\\" in folder:
            raise ConversionError(f"{path}: expected modules in this folder, got {folder!r}")
    return [folder for folder in folders if folder]
