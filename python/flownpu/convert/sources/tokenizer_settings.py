# SPDX-License-Identifier: Apache-2.0
"""Makes tokenizer_config.json one that ORT GenAI opens, too, without a change for transformers.

GenAI reads the file for guidance and for images, and refuses classes that it does not know and templates that are not
one text. FlowNPU's own tokens are those of tokenizer.json, whatever the class.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from flownpu.convert.errors import ConversionError
from flownpu.model.folder import CLASS_TOKENS, MORE_TEMPLATES

SETTINGS = "tokenizer_config.json"
ANY_CLASS = "PreTrainedTokenizerFast"
"""The class of transformers that reads all from tokenizer.json; transformers takes it for classes that it lacks."""
# The classes that onnxruntime_genai.Tokenizer (0.18) opens, with and without "Fast" behind them: tried with each class
# that transformers 5.23 knows (2026-11).
_KNOWN = {
    *("BaichuanTokenizer", "CLIPTokenizer", "ChatGLMTokenizer", "CodeGenTokenizer", "CodeLlamaTokenizer"),
    *("DebertaV2Tokenizer", "GPT2Tokenizer", "GPTNeoXTokenizer", "GemmaTokenizer", "InternLM2Tokenizer"),
    *("LlamaTokenizer", "Phi3Tokenizer", "PreTrainedTokenizer", "Qwen2Tokenizer", "T5Tokenizer"),
    *("TokenizersBackend", "WhisperTokenizer", "XLMRobertaTokenizer"),
}


def readable_by_genai(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """The files of a tokenizer, by path relative to its folder, as GenAI reads them.

    Raises:
        ConversionError: tokenizer_config.json is not a JSON object, or names a template by what cannot name a file.
    """
    content = files.get(SETTINGS, b"{}")
    try:
        settings = json.loads(content)
    except ValueError as error:
        raise ConversionError(f"{SETTINGS} is not valid JSON ({error}): download it again") from error
    if not isinstance(settings, dict):
        raise ConversionError(f"{SETTINGS}: expected a JSON object, got a {type(settings).__name__}")
    changed = dict(settings)
    if SETTINGS not in files or str(settings.get("tokenizer_class", ANY_CLASS)).removesuffix("Fast") not in _KNOWN:
        changed["tokenizer_class"] = ANY_CLASS
        tokens = CLASS_TOKENS.get(str(settings.get("tokenizer_class")).removesuffix("Fast"), (None, None))
        for name, text in zip(("bos_token", "eos_token"), tokens, strict=True):
            if text is not None:
                changed.setdefault(name, text)
    templates: dict[str, bytes] = {}
    if not isinstance(settings.get("chat_template", ""), str):
        # Separate files have precedence over the configuration.
        own = any(name.endswith(".jinja") for name in files)
        templates = {} if own else _template_files(changed["chat_template"])
        del changed["chat_template"]
    if changed == settings:
        return dict(files)
    return {**files, **templates, SETTINGS: json.dumps(changed, ensure_ascii=False, indent=2).encode()}


def _template_files(templates: Any) -> dict[str, bytes]:
    """The files of a list of named templates, as transformers writes them."""
    found: dict[str, bytes] = {}
    for one in templates or []:
        name, text = (one.get("name"), one.get("template")) if isinstance(one, dict) else (None, None)
        if not isinstance(name, str) or not isinstance(text, str) or not re.fullmatch(r"[\w-]{1,64}", name):
            raise ConversionError(
                f'{SETTINGS}: expected chat_template to be a text, or a list of {{"name": ..., "template": ...}} with '
                f"names of letters and digits, got {name!r}"
            )
        found["chat_template.jinja" if name == "default" else f"{MORE_TEMPLATES}/{name}.jinja"] = text.encode()
    return found
