# SPDX-License-Identifier: Apache-2.0
"""The trained small model, converted, and transformers' model of it with the weights that Q4NX made."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from flownpu.ops import q4nx

CHECKPOINT = Path(__file__).parents[1] / "fixtures" / "gemma3-topics"
PROMPTS = (
    'The "for" statement is used to',
    "An assignment statement evaluates the expression list",
    "Strings are",
    "If the class defines",
    "The following exceptions are raised when",
)

Tokens = list[int]


@pytest.fixture(scope="session")
def open_model(
    genai: Any, converted: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Any]:
    """A converted model in GenAI: on our provider, or ("cpu") on ONNX Runtime's own through the file's functions."""
    opened: dict[str, Any] = {}

    def model(provider: str = "flownpu", provider_options: dict[str, str] | None = None, **options: Any) -> Any:
        key = json.dumps([provider, provider_options, options], sort_keys=True)
        if key not in opened:
            folder = tmp_path_factory.mktemp("opened") / "model"
            shutil.copytree(converted(**options), folder)
            config = json.loads((folder / "genai_config.json").read_text())
            providers = [{"FlowNPUExecutionProvider": provider_options or {}}] if provider == "flownpu" else []
            config["model"]["decoder"]["session_options"]["provider_options"] = providers
            (folder / "genai_config.json").write_text(json.dumps(config))
            opened[key] = genai.Model(str(folder))
        return opened[key]

    return model


@pytest.fixture(scope="session")
def tokenizer(genai: Any, open_model: Callable[..., Any]) -> Any:
    return genai.Tokenizer(open_model())


@pytest.fixture(scope="session")
def prompts(tokenizer: Any) -> list[Tokens]:
    return [tokenizer.encode(prompt).tolist() for prompt in PROMPTS]


@pytest.fixture(scope="session")
def held_out(tokenizer: Any) -> Tokens:
    """Tokens of text that the model was not trained on."""
    return tokenizer.encode((CHECKPOINT / "held_out.txt").read_text())[:2048].tolist()  # type: ignore[no-any-return]


def load_checkpoint(*, quantised: bool) -> transformers.PreTrainedModel:
    """The checkpoint in float32; quantised: with the projections and the embedding as Q4NX stores them."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        CHECKPOINT, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if quantised and name.endswith(("_proj.weight", "embed_tokens.weight")):
                parameter.copy_(torch.from_numpy(q4nx.dequantize_codes(q4nx.quantize(parameter.numpy()))))
    return model


@pytest.fixture(scope="session")
def original() -> transformers.PreTrainedModel:
    """The checkpoint's own bf16 weights, computed in float32."""
    return load_checkpoint(quantised=False)


@pytest.fixture(scope="session")
def reference() -> transformers.PreTrainedModel:
    """The checkpoint's weights in float32, with the projections and the embedding as Q4NX stores them."""
    return load_checkpoint(quantised=True)


def logits_of(model: transformers.PreTrainedModel, tokens: Tokens) -> np.ndarray:
    """Logits of all tokens, float64 [tokens, vocabulary]."""
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0].double().numpy()  # type: ignore[no-any-return]
