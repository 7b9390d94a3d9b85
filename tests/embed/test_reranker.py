# SPDX-License-Identifier: Apache-2.0
"""Scores of pairs of texts are transformers'."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer

from flownpu.cli import main
from flownpu.convert import convert
from flownpu.embed import EmbeddingModel, Reranker, open_reranker
from flownpu.errors import FlowNPUError
from flownpu.ops import q4nx
from tests.decoding import float32_tolerance
from tests.embed.checkpoints import DECODER, SENTENCES, make_generating_reranker
from tests.embed.conftest import Model
from tests.embed.test_embeddings import BFLOAT16, BFLOAT16_TOLERANCE, FLOAT32_TOLERANCE

QUERY = "where does the river run?"
DOCUMENTS = [*SENTENCES, "", "word " * 200]


@pytest.mark.parametrize("name", ["bert-score", "xlm-roberta-score"])
def test_scores_equal_transformers(name: str, model: Callable[[str], Model]) -> None:
    made = model(name)
    expected = np.array([made.hidden((QUERY, document), "logits")[0, 0] for document in DOCUMENTS])
    # A logit is the product of the classifier's weights and a vector with elements below 1. Errors are relative to the
    # largest possible product.
    weights = dict(made.reference.named_parameters())
    last = next(value for place, value in weights.items() if value.ndim == 2 and len(value) == 1)
    largest = float(last.detach().norm()) * last.shape[1] ** 0.5
    for provider, options, tolerance in (("cpu", {}, FLOAT32_TOLERANCE), ("flownpu", BFLOAT16, BFLOAT16_TOLERANCE)):
        found = Reranker(made.folder, provider=provider, options=options).score(QUERY, DOCUMENTS)
        assert np.abs(found.logits - expected).max() < tolerance * largest
        np.testing.assert_allclose(found.scores, 1 / (1 + np.exp(-found.logits)), rtol=1e-6)
        assert found.cut == [len(DOCUMENTS) - 1]
    # The bound is tight enough to tell documents apart.
    assert np.ptp(expected) > FLOAT32_TOLERANCE * largest


def test_model_of_other_kind_is_refused(model: Callable[[str], Model]) -> None:
    with pytest.raises(FlowNPUError, match=r"an output logits, got .* and last_hidden_state"):
        Reranker(model("bert-mean").folder, provider="cpu")
    with pytest.raises(FlowNPUError, match=r"holds no modules\.json"):
        EmbeddingModel(model("bert-score").folder, provider="cpu")


# --- Models that generate ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def generating(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A checkpoint of Qwen3-Reranker's form, and the folder made of it."""
    root = tmp_path_factory.mktemp("generating")
    convert(make_generating_reranker(root / "checkpoint"), root / "model")
    return root / "checkpoint", root / "model"


# The prompt that Qwen3-Reranker's paper and card give.
FORM = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    "<Instruct>: {}\n<Query>: {}\n<Document>: {}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
)


def test_generating_model_scores_equal_its_logits(generating: tuple[Path, Path]) -> None:
    checkpoint, folder = generating
    reference = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    with torch.no_grad():
        for parameter in reference.parameters():
            if parameter.ndim == 2:
                rounded = q4nx.dequantize_codes(q4nx.quantize(parameter.numpy()))
                parameter.copy_(torch.from_numpy(rounded))
        logits = []
        for document in SENTENCES:
            ids = tokenizer.encode(FORM.format("find it", QUERY, document), add_special_tokens=False).ids
            logits.append(reference(torch.tensor([ids])).logits[0, -1].numpy())
    answers = np.array(logits)[:, [tokenizer.token_to_id("yes"), tokenizer.token_to_id("no")]]
    probabilities = np.exp(answers) / np.exp(answers).sum(1, keepdims=True)
    opened = open_reranker(folder, provider="cpu")
    opened.instruction = "find it"
    found = opened.score(QUERY, SENTENCES)
    # The cache is in bf16: keys and values are rounded, by some 2^-9 of themselves, in two layers.
    tolerance = float32_tolerance(np.array(logits), 2, DECODER["intermediate_size"])
    tolerance += 2 * 2 * 2.0**-9 * float(np.std(logits))
    np.testing.assert_allclose(found.logits, answers[:, 0] - answers[:, 1], rtol=0, atol=2 * tolerance)
    np.testing.assert_allclose(found.scores, probabilities[:, 0], rtol=0, atol=tolerance)
    assert np.ptp(found.logits) > 20 * tolerance
    ours = open_reranker(folder, options=BFLOAT16)
    ours.instruction = "find it"
    assert np.abs(ours.score(QUERY, SENTENCES).logits - found.logits).max() < 0.05 * float(np.std(logits)) * 2


def test_long_documents_are_cut_and_question_is_not(generating: tuple[Path, Path]) -> None:
    opened = open_reranker(generating[1], provider="cpu")
    found = opened.score(QUERY, ["short", "word " * 300, "word " * 400])
    assert (found.cut, max(found.tokens)) == ([1, 2], 512)
    assert found.logits[1] == found.logits[2]  # the documents are alike up to the cut


def test_rerank_command_takes_both_kinds(
    generating: tuple[Path, Path], model: Callable[[str], Model], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["rerank", str(generating[1]), "-q", QUERY, "--device", "cpu", *SENTENCES[:3]]
    scores = []
    for more in ([], ["--instruction", "a text that rhymes"]):
        assert main([*arguments, *more]) == 0
        scores.append([line[:6] for line in capsys.readouterr().out.splitlines()])
    assert scores[0] != scores[1]
    assert main(["rerank", str(model("bert-score").folder), "-q", QUERY, "--instruction", "x", "a text"]) == 1
    assert "is told nothing else: leave --instruction out" in capsys.readouterr().err
