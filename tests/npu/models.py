# SPDX-License-Identifier: Apache-2.0
"""Small models for the NPU's device: the trained one, and untrained ones of the sizes that the array takes."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from flownpu.aie.programs.decode import DECODE_WAYS
from flownpu.convert import convert
from flownpu.npu.artifacts import build_artifacts
from tests.convert.conftest import TinyModel, write_tiny
from tests.end_to_end.conftest import load_checkpoint

TRAINED = Path(__file__).parents[1] / "fixtures" / "gemma3-topics"
# The rows of each projection are multiples of 32, and enough for prefill's designs; the feed-forward is no multiple of
# 64, and the hidden size no multiple of a block's columns.
SIZES: dict[str, Any] = {
    "hidden_size": 288,
    "intermediate_size": 608,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 320,
    "max_position_embeddings": 1024,
}
# "narrow" has fewer columns than a megatile of prefill's GEMM. The vocabulary of "odd" does not fill whole blocks, the
# feed-forward of "uneven" neither whole blocks nor whole groups. "wide" has more weights, "deep" more layers. No design
# takes heads like those of "head of 80".
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "odd": ("llama", {"vocab_size": 300}),
    "uneven": ("llama", {"intermediate_size": 600}),
    "narrow": ("llama", {"intermediate_size": 448}),
    "wide": ("llama", {"intermediate_size": 4096}),
    "deep": ("llama", {"num_hidden_layers": 9}),
    # Biases of queries, keys and values: among the columns that pad the hidden size, and in a block of their own.
    "biases": ("qwen2", {"spread": 0.05}),
    "bias block": ("qwen2", {"spread": 0.05, "hidden_size": 256, "tie_word_embeddings": True}),
    # Three of five experts, whose gates fill neither whole blocks of 64 rows nor whole groups.
    "experts": ("qwen3_moe", {"num_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 152}),
    "head of 80": ("llama", {"hidden_size": 320, "head_dim": 80}),
}
# Two layers in the full shapes of public models, with a small vocabulary. A prompt needs only the last layer's keys and
# values.
_FULL = {"vocab_size": 320, "max_position_embeddings": 1024, "spread": 0.0, "num_hidden_layers": 2}
VARIANTS |= {
    "gemma3-1b": (
        "gemma3_text",
        _FULL | {"hidden_size": 1152, "intermediate_size": 6912, "num_attention_heads": 4, "num_key_value_heads": 1,
                 "head_dim": 256, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 32},
    ),
    "llama3.2-1b": (
        "llama",
        _FULL | {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32, "num_key_value_heads": 8,
                 "head_dim": 64},
    ),
}  # fmt: skip


def make_checkpoint(name: str, folder: Path) -> TinyModel:
    """A checkpoint and its reference: "trained", a family's (tests/convert/conftest.py), or one of VARIANTS."""
    if name == "trained":
        return TinyModel(TRAINED, load_checkpoint(quantised=True))
    family, changes = VARIANTS.get(name, (name, {}))
    return write_tiny(family, folder / "checkpoint", **SIZES | changes)


class Models:
    """Small models by name, made once; `make_folder` makes a new folder whose name begins with the given one."""

    def __init__(self, make_folder: Callable[[str], Path]) -> None:
        self._make_folder = make_folder
        self._checkpoints: dict[str, TinyModel] = {}
        self._converted: dict[str, Path] = {}
        self._artifacts: dict[str, Path] = {}

    def checkpoint(self, name: str) -> TinyModel:
        """The checkpoint's folder and transformers' model of it, with its weights as Q4NX holds them."""
        if name not in self._checkpoints:
            self._checkpoints[name] = make_checkpoint(name, self._make_folder(name))
        return self._checkpoints[name]

    def converted(self, name: str, **options: Any) -> Path:
        """The folder of the converted model."""
        key = f"{name} {sorted(options.items())}"
        if key not in self._converted:
            folder = self._make_folder(name) / "model"
            convert(self.checkpoint(name).folder, folder, **options)
            self._converted[key] = folder
        return self._converted[key]

    def artifacts(self, name: str, context: int, ways: Sequence[str] = DECODE_WAYS, **options: Any) -> Path:
        """The folder of the emulator's artifacts; `ways`: those of decoding that the build may choose from.

        `options` are those of the conversion.
        """
        key = f"{name} {context} {ways} {sorted(options.items())}"
        if key not in self._artifacts:
            folder = self._make_folder(name) / "artifacts"
            built = build_artifacts(self.converted(name, **options), context=context, output=folder, ways=ways)
            assert not any(left.what.startswith("chunks") for left in built.left_out), built.left_out
            self._artifacts[key] = folder
        return self._artifacts[key]
