# SPDX-License-Identifier: Apache-2.0
"""The model's own head for multi-token prediction as a draft: what it proposes, and that it changes no text."""

import copy
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import onnx
import pytest
import torch

from flownpu.convert import convert
from flownpu.errors import FlowNPUError
from flownpu.generate.language_model import LanguageModel, Sampling
from flownpu.generate.speculative.model import Speculation
from flownpu.generate.speculative.prediction_head import HeadCandidates
from flownpu.generate.speculative.prediction_head import PredictionHead as OpenHead
from tests.convert.conftest import TinyModel, write_tiny
from tests.convert.sources.gguf_files import write_gguf
from tests.fixtures.prediction_heads import PredictionHead, add_head, read_head, with_q4nx_weights
from tests.generate.conftest import steady

IDS = np.random.default_rng(8).integers(4, 260, 200).astype(np.int32)
OPTIONS = {"activations": "bf16"}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """A checkpoint with a head of random weights, and a model of it beside."""
    folder = tmp_path_factory.mktemp("qwen")
    tiny = write_tiny("qwen3_5_text", folder / "checkpoint", max_position_embeddings=512)
    torch.manual_seed(5)
    head = PredictionHead(tiny.reference.config)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.15)
    add_head(tiny.folder, head)
    convert(tiny.folder, folder / "model", kv_dtype="fp32")
    return tiny


def chosen(head: PredictionHead, tiny: TinyModel, tokens: np.ndarray, count: int) -> tuple[list[int], np.ndarray]:
    """The tokens that the head proposes behind a sequence by its equation, and the logits of each, float32 [n, V]."""
    ids, found, logits = torch.from_numpy(tokens.astype(np.int64))[None], [], []
    with torch.no_grad():
        hidden = tiny.reference.model(input_ids=ids[:, :-1]).last_hidden_state
        for _ in range(count):
            states = head(tiny.reference, ids[:, 1:], hidden)[:, -1:]
            logits.append(tiny.reference.lm_head(states)[0, 0].numpy())
            found.append(int(logits[-1].argmax()))
            ids = torch.cat([ids, torch.tensor([[found[-1]]])], 1)
            hidden = torch.cat([hidden, states], 1)
    return found, np.array(logits)


def test_candidates_of_head_equal_its_equation(tiny: TinyModel) -> None:
    """Behind a prompt, behind tokens of which the last candidates were, and behind a rewind.

    With bf16 activations a candidate is the equation's likeliest token, or one of a logit as near to it as roundings
    bring two: those of the first layers' states and of the head's own layer have 2^-9 of a standard deviation each.
    """
    reference = with_q4nx_weights(read_head(tiny.folder, tiny.reference.config))
    opened = OpenHead(tiny.folder.parent / "model", "flownpu", OPTIONS, None)
    candidates = HeadCandidates(opened, 256)

    def states(length: int) -> np.ndarray:
        with torch.no_grad():
            ids = torch.from_numpy(IDS[:length].astype(np.int64))[None]
            found: np.ndarray = tiny.reference.model(input_ids=ids).last_hidden_state[0].numpy()
            return found

    def check(length: int) -> None:
        found = candidates.propose(IDS[:length].tolist(), 3)
        sequence = IDS[:length]
        for token in found:
            _, logits = chosen(reference, tiny, sequence, 1)
            assert logits[0].max() - logits[0][token] < 0.1 * logits[0].std()
            break  # those behind depend on this one, which may be another of nearly the same logit
        expected, logits = chosen(reference, tiny, IDS[:length], 3)
        gaps = np.sort(logits, -1)[:, -1] - np.sort(logits, -1)[:, -2]
        clear = int(np.argmin(np.append(gaps > 0.1 * logits.std(-1), False)))
        assert found[:clear] == expected[:clear]
        decided.append(clear)

    def compute(first: int, length: int) -> None:
        rows = states(length)[first:]
        candidates.computed(length, lambda _name: rows[None])

    decided: list[int] = []
    compute(0, 30)
    check(31)
    compute(30, 34)  # the last of these are wrong candidates' in the place of the text's
    check(33)
    compute(32, 40)
    check(41)
    candidates.rewound(36)
    compute(35, 44)
    check(45)
    assert sum(decided) >= 6


@pytest.mark.parametrize("sampling", [Sampling(temperature=0), Sampling(temperature=1.0, seed=3)])
def test_head_changes_no_text(tiny: TinyModel, sampling: Sampling, generate: Callable[..., list[int]]) -> None:
    """Through two prompts, the first longer than what states are kept before."""
    folder = tiny.folder.parent / "model"
    plain = LanguageModel(folder, options=OPTIONS).generator(512, sampling)
    expected = [generate(plain, IDS[:100], 30)]
    plain.get_logits()  # computes the last token
    expected.append(generate(plain, IDS[100:110], 30))
    for lookup in (False, True):
        model = steady(LanguageModel(folder, options=OPTIONS, speculation=Speculation(lookup, head=True)))
        generator = model.generator(512, sampling)
        assert [generate(generator, IDS[:100], 30), generate(generator, IDS[100:110], 30)] == expected
        assert generator.tally.candidates > 0


def test_head_of_gguf_equals_that_of_checkpoint(tiny: TinyModel, tmp_path: Path) -> None:
    """By the names of the gguf package; its norms include the 1 that is added to those of checkpoints."""
    config, reference = tiny.reference.config, read_head(tiny.folder, tiny.reference.config)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN35, config.num_hidden_layers + 1)
    joined = {
        "fc": gguf.MODEL_TENSOR.NEXTN_EH_PROJ,
        "pre_fc_norm_embedding": gguf.MODEL_TENSOR.NEXTN_ENORM,
        "pre_fc_norm_hidden": gguf.MODEL_TENSOR.NEXTN_HNORM,
        "norm": gguf.MODEL_TENSOR.NEXTN_SHARED_HEAD_NORM,
    }

    def add_drafter(writer: gguf.GGUFWriter) -> None:
        writer.kv_data[0]["qwen35.block_count"].value += 1
        writer.add_nextn_predict_layers(1)
        for name, value in reference.state_dict().items():
            module, block = name.removesuffix(".weight"), config.num_hidden_layers
            if module in joined:
                stored = gguf.TENSOR_NAMES[joined[module]].format(bid=block)
            else:
                stored = names.get_name(name.replace("layers.0", f"model.layers.{block}").removesuffix(".weight"))
            writer.add_tensor(f"{stored}.weight", value.numpy() + np.float32(value.ndim == 1))

    write_gguf(
        tmp_path / "model.gguf",
        copy.deepcopy(tiny.reference),
        lambda _name: gguf.GGMLQuantizationType.F16,
        edit=add_drafter,
    )
    convert(tmp_path / "model.gguf", tmp_path / "model", kv_dtype="fp32")

    def weights(folder: Path) -> dict[str, np.ndarray]:
        model = onnx.load(str(folder / "mtp.onnx"))
        return {w.name: onnx.numpy_helper.to_array(w) for w in model.graph.initializer if w.name.startswith("mtp.")}

    expected, found = weights(tiny.folder.parent / "model"), weights(tmp_path / "model")
    assert len(expected) > len(joined)
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_array_equal(found[name], values, err_msg=name)


def test_model_without_head_is_refused(tmp_path: Path) -> None:
    plain = write_tiny("qwen3_5_text", tmp_path / "checkpoint")
    convert(plain.folder, tmp_path / "model")
    with pytest.raises(FlowNPUError, match=r"has no mtp\.onnx, the head of a model for multi-token prediction"):
        LanguageModel(tmp_path / "model", speculation=Speculation(head=True))
