# SPDX-License-Identifier: Apache-2.0
"""Writes a Gemma3 of random weights: the vision tower of the public models, SigLIP-So400m, and a small text part.

    python -m benchmarks.engines.vision_checkpoint FOLDER --layers 27

Pictures have 896 x 896 pixels, 4096 patches and 256 tokens; the tower has 27 layers with 16 heads of size 72. The text
part has few layers, so that the time to the first token is mostly the tower's.
"""

from pathlib import Path
from typing import Annotated

import torch
import transformers
import typer
from tokenizers import AddedToken, Tokenizer

_TOKENIZER = Path(__file__).parents[2] / "tests" / "fixtures" / "gemma3-topics" / "tokenizer.json"
_SPECIAL = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
_WORDS = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}
_CHAT = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
_VISION = {
    "hidden_size": 1152,
    "num_attention_heads": 16,
    "intermediate_size": 4304,
    "image_size": 896,
    "patch_size": 14,
    "vision_use_head": False,
}
_TEXT = {
    "hidden_size": 640,
    "intermediate_size": 2048,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "max_position_embeddings": 4096,
    "sliding_window": 512,
    "layer_types": ["sliding_attention", "full_attention"],
    "bos_token_id": 2,
    "eos_token_id": 1,
    "pad_token_id": 0,
}


def write_checkpoint(folder: Path, layers: int) -> None:
    """Writes weights in bfloat16, tokenizer and processor files.

    Args:
        folder: gets the files; it is made if it does not exist.
        layers: layers of the vision tower; the public models have 27.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer.from_file(str(_TOKENIZER))
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in _SPECIAL.values()])
    boi, eoi, image = (tokenizer.token_to_id(text) for text in _SPECIAL.values())
    config = transformers.Gemma3Config(
        text_config={**_TEXT, "vocab_size": -(-tokenizer.get_vocab_size() // 32) * 32},
        vision_config={**_VISION, "num_hidden_layers": layers},
        mm_tokens_per_image=256,
        boi_token_index=boi,
        eoi_token_index=eoi,
        image_token_index=image,
    )
    torch.manual_seed(0)
    model = transformers.Gemma3ForConditionalGeneration(config)
    with torch.no_grad():  # transformers initialises it with zeros, which would make the features zeros, too
        projection = model.model.multi_modal_projector.mm_input_projection_weight
        projection.normal_(std=projection.shape[0] ** -0.5)
    model.bfloat16().save_pretrained(folder)
    words = transformers.PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        extra_special_tokens=_SPECIAL,
        **_WORDS,
        chat_template=_CHAT,
    )
    pictures = transformers.Gemma3ImageProcessor(
        size={"height": 896, "width": 896}, image_mean=[0.5] * 3, image_std=[0.5] * 3
    )
    transformers.Gemma3Processor(pictures, words, chat_template=_CHAT, image_seq_length=256).save_pretrained(folder)


def main(folder: Path, layers: Annotated[int, typer.Option(min=1)] = 27) -> None:
    """Writes the checkpoint."""
    write_checkpoint(folder, layers)


if __name__ == "__main__":
    typer.run(main)
