# SPDX-License-Identifier: Apache-2.0
"""The folder that `flownpu convert` writes and that ORT GenAI reads: its configuration, checked before use."""

import json
import logging
import os
import reprlib
from pathlib import Path
from typing import Any

from flownpu.errors import FlowNPUError
from flownpu.registration import get_ep_name

# The file in which `flownpu convert` records the model's sources.
MANIFEST = "flownpu_manifest.json"
# The graph of a model's head for multi-token prediction, beside the decoder's.
PREDICTION_HEAD = "mtp.onnx"
# The graph of a small model that drafts for another, whose keys and values it reads.
DRAFTER = "drafter.onnx"
# The file in which sentence-transformers says how hidden states become embeddings.
MODULES = "modules.json"
# The file in which diffusers says of which parts a pipeline consists.
PIPELINE = "model_index.json"
# The folder in which transformers puts chat templates beside the usual one, such as tool_use.jinja.
MORE_TEMPLATES = "additional_chat_templates"
# Special tokens of transformers' (5.23) tokenizer classes, where tokenizer_config.json does not name any: bos, eos.
CLASS_TOKENS = {
    "CodeLlamaTokenizer": ("<s>", "</s>"),
    "CohereTokenizer": ("<BOS_TOKEN>", "<|END_OF_TURN_TOKEN|>"),
    "GPT2Tokenizer": ("<|endoftext|>", "<|endoftext|>"),
    "GPTNeoXTokenizer": ("<|endoftext|>", "<|endoftext|>"),
    "GemmaTokenizer": ("<bos>", "<eos>"),
    "LlamaTokenizer": ("<s>", "</s>"),
    "Qwen2Tokenizer": (None, "<|endoftext|>"),
    "Qwen3_5Tokenizer": (None, "<|endoftext|>"),
}
# The place of the graph that optimum exports, in sentence-transformers' folders.
EXPORTED_GRAPH = "onnx/model.onnx"

# The settings of genai_config.json that are read, whether each is required, and its type. GenAI keeps sizes and token
# ids in 32 bits.
_NEEDED = ("model.decoder", "model.type", "model.context_length", "model.vocab_size")
_KINDS = {
    "model": "an object",
    "model.type": "a text",
    "model.context_length": "a size",
    "model.vocab_size": "a size",
    "model.decoder": "an object",
    "model.decoder.filename": "the name of a file beside it",
    "model.decoder.num_hidden_layers": "a size",
    "model.decoder.head_size": "a size",
    "model.decoder.session_options": "an object",
    "model.decoder.session_options.provider_options": "a list of objects",
    "model.decoder.sliding_window": "an object",
    "model.decoder.sliding_window.window_size": "a size",
    "model.decoder.sliding_window.layers": "a list of layers",
    "model.vision": "an object",
    "model.vision.filename": "the name of a file beside it",
    "model.vision.config_filename": "the name of a file beside it",
    "model.vision.outputs": "an object",
    "model.vision.outputs.image_features": "a text",
    "model.embedding": "an object",
    "model.embedding.filename": "the name of a file beside it",
    "search": "an object",
    "search.max_length": "a size",
}
_MISSING = object()
_log = logging.getLogger(__name__)
# Most bytes of a file's name on Linux's file systems (NAME_MAX).
_LONGEST_NAME = 255


def is_embedding_folder(folder: Path) -> bool:
    """Whether a folder holds a model that embeds texts: a graph, and the modules.json that says how."""
    return (folder / MODULES).is_file() and (folder / "model.onnx").is_file()


def is_reranker_folder(folder: Path) -> bool:
    """Whether a folder holds a model that classifies pairs of texts: a graph, and transformers' word for its task."""
    if not (folder / "model.onnx").is_file() or not (folder / "config.json").is_file():
        return False
    names = read_json(folder / "config.json").get("architectures") or []
    return any(str(name).endswith("ForSequenceClassification") for name in names)


def is_pipeline_folder(folder: Path) -> bool:
    """Whether a folder holds a pipeline of diffusers, which makes pictures."""
    return (folder / PIPELINE).is_file()


def check_pipeline_folder(folder: Path) -> None:
    """Raises FlowNPUError unless the folder holds a pipeline of diffusers with graphs; the message says what to do."""
    export = f"`optimum-cli export onnx --task text-to-image --model {folder} OUT` exports it"
    if not is_pipeline_folder(folder):
        raise FlowNPUError(
            f"{folder}: expected a pipeline of diffusers, with {PIPELINE}, and there is none: "
            "`optimum-cli export onnx --task text-to-image --model PIPELINE OUT` writes such a folder"
        )
    if not any((folder / part / "model.onnx").is_file() for part in ("unet", "transformer")):
        raise FlowNPUError(f"{folder}: the pipeline's networks are no graphs (no unet/model.onnx): {export}")


def read_genai_config(folder: Path) -> dict[str, Any]:
    """Reads and checks the folder's genai_config.json.

    Raises:
        FlowNPUError: there is no such folder or file, or it is not what GenAI needs; the message says what to do.
    """
    path = folder / "genai_config.json"
    if folder.suffix == ".gguf" and folder.is_file():
        made = folder.with_suffix("")
        raise FlowNPUError(
            f"{folder} is a GGUF file, and this needs a model folder: `flownpu convert {folder} {made}` makes it"
        )
    if folder.is_file():
        raise FlowNPUError(f"{folder} is a file, and this needs a model folder; `flownpu convert` makes such folders")
    if not folder.is_dir():
        raise FlowNPUError(f"no such folder: {folder}. `flownpu convert CHECKPOINT {folder}` makes a model folder")
    if not path.is_file():
        if is_embedding_folder(folder):
            raise FlowNPUError(
                f"{folder} is a model that embeds texts, and this needs one that generates: `flownpu embed` runs it"
            )
        if (folder / DRAFTER).is_file():
            raise FlowNPUError(
                f"{folder} drafts for another model, whose keys and values it reads: `--draft {folder}` beside that one"
            )
        if is_pipeline_folder(folder):
            raise FlowNPUError(
                f"{folder} is a pipeline that makes pictures, and this needs a model that generates texts: "
                "`flownpu imagine` runs it"
            )
        if (folder / "config.json").is_file() and (folder / "model.onnx").is_file():
            raise FlowNPUError(
                f"{folder} is a model for optimum and onnxruntime.InferenceSession (model.onnx, config.json), and this "
                "needs one for ORT GenAI, with genai_config.json"
            )
        if (folder / "config.json").is_file():
            raise FlowNPUError(f"{folder} is a checkpoint; `flownpu convert {folder} OUT` makes a model of it to run")
        raise FlowNPUError(f"{folder} holds no genai_config.json: give the folder that `flownpu convert` wrote")
    settings = read_json(path)
    for key in _NEEDED:
        if _at(settings, key) is None:
            raise FlowNPUError(f"{path} lacks {key}, which a language model of GenAI has: convert the model again")
    check_genai_config(path, settings)
    onnx = onnx_path(folder, settings)
    if not onnx.is_file():
        raise FlowNPUError(f"{path} names {onnx.name}, which is not in {folder}: convert the model again")
    return settings


def check_genai_config(path: Path, settings: dict[str, Any]) -> None:
    """Checks the types of the settings that are read from a genai_config.json.

    Args:
        path: the file, for errors.
        settings: its contents.

    Raises:
        FlowNPUError: a setting has a value of another type.
    """
    for key, kind in _KINDS.items():
        value = _at(settings, key, _MISSING)
        if value is not _MISSING and not _is(value, kind):
            raise FlowNPUError(
                f"{path}: expected {key} to be {kind}, got {reprlib.repr(value)}: convert the model again"
            )


def _at(settings: dict[str, Any], key: str, missing: object = None) -> Any:
    """The value at a key such as "a.b" of nested objects; `missing` if there is none."""
    value: Any = settings
    for part in key.split("."):
        value = value.get(part, missing) if isinstance(value, dict) else missing
    return value


def _is(value: Any, kind: str) -> bool:
    match kind:
        case "a size":
            return isinstance(value, int) and not isinstance(value, bool) and 1 <= value < 2**31
        case "the name of a file beside it":
            return isinstance(value, str) and Path(value).name == value and "\0" not in value and _fits(value)
        case "a text":
            return isinstance(value, str)
        case "a list of objects":
            return isinstance(value, list) and all(isinstance(item, dict) for item in value)
        case "a list of layers":
            return isinstance(value, list) and all(isinstance(item, int) and item >= 0 for item in value)
        case _:
            return isinstance(value, dict)


def _fits(name: str) -> bool:
    """Whether a file system can have a file of that name."""
    try:
        return len(os.fsencode(name)) <= _LONGEST_NAME
    except UnicodeEncodeError:  # half of a surrogate pair, which JSON can hold
        return False


def most_tokens(settings: dict[str, Any]) -> int:
    """Most tokens that a sequence of the model in a GenAI folder may have; logs a warning if a window limits them.

    For a family whose configuration does not give each layer's kind, such as Mistral, ORT GenAI's builder (0.18) writes
    a window without a list of layers: GenAI then gives every layer a cache of the window's size, but the graph's
    attention needs a cache of all tokens. Such a model computes correctly as long as no token is beyond the window.
    """
    model = settings["model"]
    context, cache = int(model["context_length"]), model["decoder"].get("sliding_window") or {}
    window = cache.get("window_size", context)
    if cache.get("layers", [0]) or cache.get("slide_key_value_cache", True) or window >= context:
        return context
    _log.warning(
        "the graph does not know the window of %d tokens that genai_config.json gives the cache of every layer: "
        "sequences end there; `flownpu convert` puts it into the graph",
        window,
    )
    return int(window)


def has_states(settings: dict[str, Any]) -> bool:
    """Whether layers of the model in a GenAI folder have states in the place of a KV cache."""
    return "past_conv_names" in settings["model"]["decoder"].get("inputs", {})


def copies_states(settings: dict[str, Any]) -> bool:
    """Whether GenAI copies a model's states so that it can go back: those of models that have recurrent ones."""
    return "past_recurrent_names" in settings["model"]["decoder"].get("inputs", {})


def onnx_path(folder: Path, settings: dict[str, Any]) -> Path:
    """The decoder's ONNX file, as the folder's genai_config.json names it."""
    return folder / str(settings["model"]["decoder"].get("filename", "model.onnx"))


def other_graphs(folder: Path, settings: dict[str, Any]) -> list[Path]:
    """The ONNX files of a model's other parts, as the folder's genai_config.json names them: vision, embedding."""
    parts = (settings["model"].get(name) for name in ("vision", "embedding"))
    return [folder / str(part["filename"]) for part in parts if isinstance(part, dict) and "filename" in part]


def locate_graph(path: Path) -> tuple[Path, dict[str, Any]]:
    """The .onnx file of a model folder, or that file itself, with "model" of its genai_config.json ({} without one).

    Raises:
        FlowNPUError: there is no .onnx file, or genai_config.json is not what GenAI needs.
    """
    if path.is_dir():
        if (path / "genai_config.json").is_file() or not (path / "model.onnx").is_file():
            settings = read_genai_config(path)
            return onnx_path(path, settings), settings["model"]
        return path / "model.onnx", {}
    if path.suffix != ".onnx":
        hint = f"; `flownpu convert {path} OUT` makes one of it" if path.suffix == ".gguf" else ""
        raise FlowNPUError(f"expected a model folder or an .onnx file, got {path}{hint}")
    if not path.is_file():
        raise FlowNPUError(f"no such file: {path}")
    return path, {}


def provider_options(settings: dict[str, Any]) -> dict[str, str]:
    """The options of FlowNPU's provider in "model" of a genai_config.json, such as those that `flownpu tune` wrote."""
    entries = settings.get("decoder", {}).get("session_options", {}).get("provider_options", [])
    return next((dict(entry[get_ep_name()]) for entry in entries if get_ep_name() in entry), {})


def template_files(folder: Path) -> list[Path]:
    """The files of a folder that hold nothing but a chat template."""
    default = folder / "chat_template.jinja"
    return [*([default] if default.is_file() else []), *sorted((folder / MORE_TEMPLATES).glob("*.jinja"))]


def chat_templates(folder: Path) -> dict[str, str]:
    """The Jinja templates by which the folder's tokenizer writes a conversation, by name; "default" is the usual one.

    As transformers (5.23) finds them: files of their own come before tokenizer_config.json, and that before
    chat_template.json, which processors of images have.

    Raises:
        FlowNPUError: a file is not UTF-8, or not JSON of the form that transformers reads.
    """
    found = {}
    for path in template_files(folder):
        name = path.stem if path.parent.name == MORE_TEMPLATES else "default"
        try:
            found[name] = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise FlowNPUError(
                f"{path} is not in UTF-8: convert it (`iconv -f latin1 -t utf-8`); {error.reason} at {error.start}"
            ) from error
    for name in ("tokenizer_config.json", "chat_template.json"):
        path = folder / name
        if not found and path.is_file():
            found = _templates_in(path)
    return found


def _templates_in(path: Path) -> dict[str, str]:
    """The templates in a JSON file: a text, or a list of objects with their names."""
    value = read_json(path).get("chat_template")
    if value is None:
        return {}
    named: Any = value if isinstance(value, list) else [{"name": "default", "template": value}]
    try:
        found = {item["name"]: item["template"] for item in named}
        if all(isinstance(text, str) for item in found.items() for text in item):
            return found
    except (KeyError, TypeError):
        pass
    raise FlowNPUError(
        f'{path}: expected chat_template to be a text, or a list of objects with "name" and "template", got '
        f"{reprlib.repr(value)}"
    )


def special_tokens(folder: Path) -> dict[str, str]:
    """The texts of a tokenizer's special tokens by name, such as "bos_token", which chat templates write.

    As transformers (5.23) gives them to templates: special_tokens_map.json counts where tokenizer_config.json does not
    list the added tokens, and the tokenizer's class where neither names a token.

    Raises:
        FlowNPUError: a file is not a JSON object.
    """
    path, older = folder / "tokenizer_config.json", folder / "special_tokens_map.json"
    settings = read_json(path) if path.is_file() else {}
    if "added_tokens_decoder" not in settings and older.is_file():
        settings = settings | read_json(older)
    more = settings.get("extra_special_tokens")
    bos, eos = CLASS_TOKENS.get(str(settings.get("tokenizer_class")).removesuffix("Fast"), (None, None))
    named = {"bos_token": bos, "eos_token": eos, **settings, **(more if isinstance(more, dict) else {})}
    # A token is its text, or an object that has it as "content".
    texts = {name: value.get("content") if isinstance(value, dict) else value for name, value in named.items()}
    return {
        name: text
        for name, text in texts.items()
        if isinstance(text, str) and (name.endswith("_token") or (isinstance(more, dict) and name in more))
    }


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file of a model folder; FlowNPUError if it holds anything else."""
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise FlowNPUError(f"{path} is not valid JSON ({error}): convert the model again") from error
    if not isinstance(settings, dict):
        raise FlowNPUError(
            f"{path} holds a JSON {type(settings).__name__}, expected an object: convert the model again"
        )
    return settings
