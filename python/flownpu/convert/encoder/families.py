# SPDX-License-Identifier: Apache-2.0
"""Text encoders like BERT, their families, and reading their configuration (config.json)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from flownpu.convert.errors import ConversionError
from flownpu.convert.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Mapping

    from flownpu.convert.dense.graph import GeluKind

# Most layers that a configuration may ask for, since the plan of the weights lists each layer: more than any model has.
_MOST_LAYERS = 4096
_CLASSIFIER = "ForSequenceClassification"
_GELUS: dict[str, GeluKind] = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
}
# The defaults of BertConfig in transformers. `EncoderFamily.defaults` has the differences of other families.
_DEFAULTS: dict[str, Any] = {
    "vocab_size": 30522,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "hidden_act": "gelu",
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
    "position_embedding_type": "absolute",
}


@dataclass(frozen=True)
class TextEncoder:
    """A transformer encoder with learned positions, whose layers normalise after the residual (post-LN).

    A layer is: attention of all tokens to all tokens, residual, layer norm; GELU feed-forward, residual, layer norm.
    All products have a bias.
    """

    hidden_size: int
    feed_forward_size: int
    heads: int
    layers: int
    vocabulary_size: int
    positions: int
    """How many tokens a text may have."""
    first_position: int
    """The row of the positions' table for a text's first token."""
    types: int
    """How many token types there are (first text of a pair, second text), each with an embedding; 1: all are alike."""
    norm_epsilon: float
    gelu: GeluKind
    head: Literal["none", "pooler", "dense"] = "none"
    """The head that computes a pair's score from its first token: a product, tanh, and another product. The two kinds
    differ in the names of their tensors only. "none": the model embeds texts."""

    @property
    def head_size(self) -> int:
        """The papers' d: how many dimensions a head has."""
        return self.hidden_size // self.heads


@dataclass(frozen=True)
class EncoderFamily:
    """The properties in which families of text encoders differ."""

    model_type: str
    """The family's model_type in config.json."""
    prefix: str
    """The prefix of the tensors' names in a model that was saved with a head."""
    head: Literal["pooler", "dense"]
    """See `TextEncoder.head`."""
    counts_from_padding: bool = False
    """The first token's position is the padding token's id + 1, and not 0."""
    defaults: tuple[tuple[str, Any], ...] = ()


ENCODERS = {
    family.model_type: family
    for family in (
        EncoderFamily("bert", "bert.", "pooler"),
        *(
            EncoderFamily(
                name,
                "roberta.",
                "dense",
                counts_from_padding=True,
                defaults=(("vocab_size", words), ("pad_token_id", 1)),
            )
            for name, words in (("roberta", 50265), ("xlm-roberta", 30522), ("camembert", 30522))
        ),
    )
}
"""The families by their model_type in config.json."""


def is_text_encoder(config: Mapping[str, Any]) -> bool:
    """Whether a checkpoint's configuration is of one of these families."""
    return config.get("model_type") in ENCODERS


def read_encoder(config: Mapping[str, Any]) -> TextEncoder:
    """The encoder that a checkpoint's configuration describes.

    Raises:
        ConversionError: it asks for something that cannot be converted, or a setting has a value of another type.
    """
    family = ENCODERS[config["model_type"]]
    settings = Settings(config, "config.json").with_defaults({**_DEFAULTS, **dict(family.defaults)})
    for key, expected in (("position_embedding_type", "absolute"), ("is_decoder", False)):
        if key in settings and settings.value(key) != expected:
            raise ConversionError(
                f"config.json: {key} is {settings.value(key)!r}, and only encoders that have {expected!r} there can be "
                "converted"
            )
    activation = settings.text("hidden_act")
    if activation not in _GELUS:
        raise ConversionError(
            f'config.json: expected hidden_act to be one of {", ".join(_GELUS)}, got "{activation}", which cannot be '
            "converted"
        )
    hidden, heads = settings.integer("hidden_size"), settings.integer("num_attention_heads")
    if hidden % heads:
        raise ConversionError(
            f"config.json: expected hidden_size to be a multiple of num_attention_heads, got {hidden} and {heads}"
        )
    first = settings.integer("pad_token_id", least=0) + 1 if family.counts_from_padding else 0
    rows = settings.integer("max_position_embeddings", least=first + 1)
    return TextEncoder(
        hidden_size=hidden,
        feed_forward_size=settings.integer("intermediate_size"),
        heads=heads,
        layers=settings.integer("num_hidden_layers", most=_MOST_LAYERS),
        vocabulary_size=settings.integer("vocab_size"),
        positions=rows - first,
        first_position=first,
        types=settings.integer("type_vocab_size"),
        norm_epsilon=settings.number("layer_norm_eps"),
        gelu=_GELUS[activation],
        head=family.head if _scores(settings) else "none",
    )


def _scores(settings: Settings) -> bool:
    """Whether the model is a classifier with one label, which scores pairs of texts; ConversionError if it has more."""
    architectures = settings.texts("architectures") if "architectures" in settings else []
    if not any(name.endswith(_CLASSIFIER) for name in architectures):
        return False
    labels = len(settings.value("id2label")) if "id2label" in settings else settings.integer("num_labels", 2)
    if labels != 1:
        raise ConversionError(
            f"config.json: expected a model that embeds texts, or one that scores pairs of them with one label, got "
            f"{architectures[0]} with {labels} labels: export it with optimum, and convert the export's folder"
        )
    return True
