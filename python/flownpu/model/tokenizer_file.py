# SPDX-License-Identifier: Apache-2.0
"""Opens the tokenizer.json of a model folder with Hugging Face's library `tokenizers`."""

from pathlib import Path
from typing import Any

from flownpu.errors import FlowNPUError, require


def open_tokenizer(folder: Path, *, extra: str, purpose: str) -> Any:
    """The folder's `tokenizers.Tokenizer`, which may cut and pad texts, as the file says.

    Args:
        folder: holds tokenizer.json.
        extra: the extra of this package that installs `tokenizers`.
        purpose: what needs it, see `require`.

    Raises:
        FlowNPUError: the file is missing or damaged.
        MissingDependencyError: `tokenizers` is not installed.
    """
    tokenizers = require("tokenizers", extra=extra, purpose=purpose)
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise FlowNPUError(
            f"{folder} holds no tokenizer.json, by which texts become tokens: take that of the checkpoint, or make it "
            "with transformers: AutoTokenizer.from_pretrained(CHECKPOINT).save_pretrained(FOLDER)"
        )
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises a plain Exception for any fault of the file
        raise FlowNPUError(f"{path}: cannot be read as a tokenizer ({error}): convert the model again") from error
