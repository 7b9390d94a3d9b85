# SPDX-License-Identifier: Apache-2.0
"""Checks, before models are opened, whether one can verify candidates and whether another can draft for it."""

from pathlib import Path
from typing import Any

from flownpu.errors import FlowNPUError
from flownpu.model.folder import copies_states, has_states, onnx_path, read_genai_config, read_json

_WITHOUT = "or leave --lookup and --draft out"


def check_verifies(folder: Path, configuration: dict[str, Any], device: str) -> None:
    """Raises FlowNPUError if a model cannot verify candidates on a device ("auto", "cpu", "npu", "emulate")."""
    model = configuration["model"]
    reason = ""
    if "dynamic_batching" in configuration.get("engine", {}):
        reason = "is a paged model, which GenAI's engine decodes: convert it without --paged"
    elif "vision" in model:
        reason = (
            "takes images, and GenAI gives logits of the last token only then: convert it with --vision-weights none"
        )
    elif str(model.get("type", "")).startswith("phi"):
        reason = "has a KV cache that GenAI computes anew when the text reaches its second table of rotations"
    elif has_states(configuration) and not copies_states(configuration):
        reason = "has convolutions with states, which GenAI does not copy, so that they cannot forget wrong candidates"
    elif device not in ("auto", "cpu"):
        reason = f"cannot verify candidates on --device {device}, which computes one token a step: take --device cpu"
    if reason:
        raise FlowNPUError(f"{folder} {reason}; {_WITHOUT}")


def check_draft(folder: Path, configuration: dict[str, Any], draft: Path) -> None:
    """Raises FlowNPUError if the model in `draft` cannot draft for the one in `folder`."""
    settings = read_genai_config(draft)
    model = settings["model"]
    reason = ""
    if "dynamic_batching" in settings.get("engine", {}):
        reason = "is a paged model, which only `flownpu serve` runs: convert it without --paged"
    elif "vision" in model:
        reason = "takes images: convert it with --vision-weights none"
    elif "sliding_window" in model["decoder"]:
        reason = "has a window-sized KV cache, which cannot forget wrong candidates: convert it without "
        reason += "--sliding-window-cache"
    elif has_states(settings):
        reason = "has layers with states, which cannot forget wrong candidates: take a draft without"
    elif (ours := _weight_bytes(draft, settings)) > (theirs := _weight_bytes(folder, configuration)):
        reason = f"is larger ({ours} bytes) than the model in {folder} ({theirs} bytes): a draft has to read less"
    else:
        reason = _difference(folder, draft)
    if reason:
        raise FlowNPUError(f"the draft model in {draft} {reason}")


def _weight_bytes(folder: Path, configuration: dict[str, Any]) -> int:
    path = onnx_path(folder, configuration)
    return sum(file.stat().st_size for file in folder.glob(f"{path.name}*") if file.is_file())


def _difference(folder: Path, draft: Path) -> str:
    """How the draft's tokenizer differs from the model's; "" if each of the model's tokens has the same text in both.

    A draft may have further tokens: as candidates they are never kept.
    """
    ours, theirs = folder / "tokenizer.json", draft / "tokenizer.json"
    for path in (ours, theirs):
        if not path.is_file():
            return f"cannot be compared: {path} is missing; convert that model again"
    if ours.read_bytes() == theirs.read_bytes():
        return ""
    texts, drafted = _texts(ours), _texts(theirs)
    differing = [token for token in sorted(texts) if drafted.get(token) != texts[token]]
    if not differing:
        return ""
    first = differing[0]
    return (
        f"has another tokenizer than the model in {folder}: {len(differing)} of {len(texts)} tokens differ, the first "
        f"is {first}, {drafted.get(first)!r} for {texts[first]!r}; take a draft of the same family"
    )


def _texts(path: Path) -> dict[int, str]:
    """The text of each token of a tokenizer.json."""
    content = read_json(path)
    vocabulary = content.get("model", {}).get("vocab", {})
    if isinstance(vocabulary, dict):
        texts = {int(token): str(text) for text, token in vocabulary.items()}
    else:  # a Unigram tokenizer: pairs of text and score, in the order of the tokens
        texts = {token: str(text) for token, (text, *_) in enumerate(vocabulary)}
    return texts | {int(token["id"]): str(token["content"]) for token in content.get("added_tokens", [])}
