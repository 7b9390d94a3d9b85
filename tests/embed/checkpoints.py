# SPDX-License-Identifier: Apache-2.0
"""Small random checkpoints of models that embed texts, as sentence-transformers lays them out."""

import json
from pathlib import Path
from typing import Any

import torch
import transformers as t
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

POSITIONS = 64
# Sizes that leave padding in blocks of 32 rows and 256 columns.
ENCODER = {
    "hidden_size": 96,
    "intermediate_size": 176,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "initializer_range": 0.1,
}
DECODER = {
    "hidden_size": 128,
    "intermediate_size": 176,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": POSITIONS,
    "initializer_range": 0.1,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
# Shapes of known encoders, for benchmarks: their checkpoints are made in the same way, with the usual initialisation.
SHAPES = {
    "minilm-l6": {"hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 6, "num_attention_heads": 12},
    "bge-small": {"hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 12, "num_attention_heads": 12},
    "bge-base": {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12},
}
# EmbeddingGemma's window covers both sides of a token: a window of 10 is 5 tokens on each side, and the token itself.
WINDOW = 10
PROMPTS = {"query": "find: ", "document": ""}
SENTENCES = [
    "the quick brown fox jumps over the lazy dog",
    "a river runs from the hills to the sea",
    "she reads books about the weather on Mars",
    "bread, salt and a little oil",
    "die Straße führt über die Brücke",
    "東京は大きい",
]


def make_checkpoint(name: str, folder: Path) -> Path:
    """Writes a checkpoint, its tokenizer and the files of sentence-transformers; returns the folder.

    Args:
        name: "bert-mean", "bert-cls", "xlm-roberta-mean", "qwen3", "gemma3", "bert-score", "xlm-roberta-score", or one
            of SHAPES.
        folder: the folder to make.
    """
    folder.mkdir(parents=True)
    tokenizer = _byte_tokenizer() if name in ("qwen3", "gemma3") else _word_tokenizer("xlm" in name)
    tokenizer.save(str(folder / "tokenizer.json"))
    model = _model(name, tokenizer.get_vocab_size())
    model.save_pretrained(folder)
    side = "left" if name == "qwen3" else "right"  # as Qwen3-Embedding has it
    padding = next(token for token in ("<pad>", "[PAD]") if tokenizer.token_to_id(token) is not None)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": padding, "padding_side": side}
    _write(folder / "tokenizer_config.json", {**settings, "model_max_length": model.config.max_position_embeddings})
    if name.endswith("score"):
        return folder
    pooling = {"bert-cls": "cls_token", "qwen3": "lasttoken"}.get(name, "mean_tokens")
    modules = ["Transformer", "Pooling", *(["Dense", "Dense"] if name == "gemma3" else []), "Normalize"]
    paths = ["", *(f"{index}_{module}" for index, module in enumerate(modules) if index)]
    _write(
        folder / "modules.json",
        [
            {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{module}"}
            for index, (module, path) in enumerate(zip(modules, paths, strict=True))
        ],
    )
    for module, path in zip(modules, paths, strict=True):
        if module == "Pooling":
            flags = {f"pooling_mode_{flag}": flag == pooling for flag in ("cls_token", "mean_tokens", "lasttoken")}
            size = model.config.hidden_size
            _write(folder / path / "config.json", {"word_embedding_dimension": size, **flags})
    if name == "gemma3":
        _dense(folder / paths[2], 128, 192)
        _dense(folder / paths[3], 192, 128)
    _write(folder / "sentence_bert_config.json", {"do_lower_case": False})
    _write(folder / "config_sentence_transformers.json", {"prompts": PROMPTS, "default_prompt_name": None})
    return folder


def make_generating_reranker(folder: Path) -> Path:
    """Writes a decoder and a tokenizer that has the special words of Qwen3-Reranker's prompt; returns the folder."""
    folder.mkdir(parents=True)
    tokenizer = _byte_tokenizer()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer.add_tokens(["yes", "no"])
    tokenizer.save(str(folder / "tokenizer.json"))
    _write(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<pad>"})
    torch.manual_seed(0)
    sizes = DECODER | {"vocab_size": tokenizer.get_vocab_size(), "max_position_embeddings": 512}
    t.Qwen3ForCausalLM(t.Qwen3Config(**sizes, tie_word_embeddings=True)).save_pretrained(folder)
    return folder


def _write(path: Path, contents: Any) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(contents), encoding="utf-8")


def _dense(folder: Path, columns: int, rows: int) -> None:
    activation = "torch.nn.modules.linear.Identity"
    settings = {"in_features": columns, "out_features": rows, "bias": False, "activation_function": activation}
    _write(folder / "config.json", settings)
    save_file({"linear.weight": torch.randn(rows, columns) / columns**0.5}, folder / "model.safetensors")


def _word_tokenizer(is_roberta: bool) -> Tokenizer:
    """WordPiece with BERT's special tokens, or with RoBERTa's under the ids that RoBERTa gives them."""
    begin, end = ("<s>", "</s>") if is_roberta else ("[CLS]", "[SEP]")
    special = ["<s>", "<pad>", "</s>", "[UNK]"] if is_roberta else ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))  # noqa: S106  (no password)
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=200, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(SENTENCES, trainer)
    middle, kind = (f"{end} {end}", 0) if is_roberta else (end, 1)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{begin} $A {end}",
        pair=f"{begin} $A {middle} $B:{kind} {end}:{kind}",
        special_tokens=[(token, tokenizer.token_to_id(token)) for token in (begin, end)],
    )
    padding = "<pad>" if is_roberta else "[PAD]"
    tokenizer.enable_padding(pad_id=tokenizer.token_to_id(padding), pad_token=padding)
    return tokenizer


def _byte_tokenizer() -> Tokenizer:
    """BPE over bytes that ends each text with a token, as Qwen3-Embedding's does."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<pad>", "<bos>", "<eos>"]
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="$A <eos>", special_tokens=[("<eos>", 2)])
    return tokenizer


def _model(name: str, words: int) -> Any:
    torch.manual_seed(0)
    encoder = {**ENCODER, "vocab_size": words, "layer_norm_eps": 1e-12}
    bert = {**encoder, "max_position_embeddings": POSITIONS}
    # RoBERTa numbers positions from the padding token's id (1) on.
    roberta = {**encoder, "max_position_embeddings": POSITIONS + 2, "type_vocab_size": 1, "pad_token_id": 1}
    decoder = {**DECODER, "vocab_size": words}
    gemma = {
        "use_bidirectional_attention": True,
        "sliding_window": WINDOW,
        "query_pre_attn_scalar": 24,
        "layer_types": ["sliding_attention", "full_attention"],
    }
    if name in SHAPES:
        return t.BertModel(t.BertConfig(**SHAPES[name])).eval()
    model = {
        "bert-mean": lambda: t.BertModel(t.BertConfig(**bert)),
        "bert-cls": lambda: t.BertModel(t.BertConfig(**bert, hidden_act="gelu_new")),
        "bert-score": lambda: t.BertForSequenceClassification(t.BertConfig(**bert, num_labels=1)),
        "xlm-roberta-mean": lambda: t.XLMRobertaModel(t.XLMRobertaConfig(**roberta)),
        "xlm-roberta-score": lambda: t.XLMRobertaForSequenceClassification(t.XLMRobertaConfig(**roberta, num_labels=1)),
        "qwen3": lambda: t.Qwen3Model(t.Qwen3Config(**decoder, tie_word_embeddings=True)),
        "gemma3": lambda: t.Gemma3TextModel(t.Gemma3TextConfig(**decoder, **gemma)),
    }[name]()
    for parameter_name, parameter in model.named_parameters():
        # They start as constants, which would hide a lost or swapped weight.
        is_norm = "norm" in parameter_name.lower()
        if is_norm or parameter_name.endswith("bias"):
            ones = is_norm and not parameter_name.endswith("bias") and name != "gemma3"
            torch.nn.init.normal_(parameter, mean=float(ones), std=0.2)
    return model.eval()
