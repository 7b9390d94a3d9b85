# SPDX-License-Identifier: Apache-2.0
"""Models of GenAI's builder as they are, lowered when a session is made, compute what converted ones compute."""

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from flownpu.cli import main
from flownpu.convert import convert
from flownpu.graph_rewrites.last_token_logits import set_logits
from flownpu.graph_rewrites.native_graph import apply_rules
from flownpu.graph_rewrites.report import Report
from flownpu.npu.layers import decoder_of_model
from flownpu.ops.definitions import add_functions
from tests.npu.match.verdicts import assert_same_decoder, told_by_session
from tests.rewrites.conftest import OPTIONS

RECIPES = [name for name in OPTIONS if name.startswith(("qwen3 in ", "llama in "))]
PROVIDER = "FlowNPUExecutionProvider"
PROMPT = [2, *(5 + 37 * i % 250 for i in range(40))]  # beyond the window of 16 (topics: 64)
NEXT = range(5, 30)


def logits(genai: Any, folder: Path, report: Path, **options: str) -> tuple[np.ndarray, dict[str, Any]]:
    """Logits [1 + tokens, V] of the prompt's last token and of each that follows; and the placement."""
    config = genai.Config(str(folder))
    config.clear_providers()
    config.append_provider(PROVIDER)
    for key, value in (options | {"placement": str(report)}).items():
        config.set_provider_option(PROVIDER, key, value)
    model = genai.Model(config)
    parameters = genai.GeneratorParams(model)
    parameters.set_search_options(max_length=len(PROMPT) + len(NEXT) + 1)
    generator = genai.Generator(model, parameters)
    generator.append_tokens(PROMPT)
    found = [generator.get_logits()[0, -1].copy()]
    for token in NEXT:
        generator.append_tokens([token])
        found.append(generator.get_logits()[0, -1].copy())
    return np.stack(found), json.loads(report.read_text())


def test_window_of_configuration_alone_ends_sequences(
    exports: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """As GenAI's builder writes Mistral: GenAI gives every layer a cache of the window, too small for the graph."""
    folder = shutil.copytree(exports["llama"], tmp_path / "model")
    config = json.loads((folder / "genai_config.json").read_text())
    config["model"]["decoder"]["sliding_window"] = {
        "window_size": 16,
        "slide_key_value_cache": False,
        "slide_inputs": False,
        "layers": [],
    }
    (folder / "genai_config.json").write_text(json.dumps(config))
    arguments = ["run", str(folder), "-p", "hello", "--max-new-tokens", "60", "--temperature", "0", "--json"]
    assert main(arguments) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["prompt_tokens"] + report["new_tokens"], report["finish_reason"]) == (16, "length")
    assert "sequences end there; `flownpu convert` puts it into the graph" in caplog.text


@pytest.mark.parametrize("name", ["gemma2", "gemma3", "llama", "qwen3", "topics", *RECIPES])
def test_unconverted_models_give_logits_of_converted_ones(
    genai: Any, exports: dict[str, Path], tmp_path: Path, name: str
) -> None:
    report = tmp_path / "placement.json"
    # The export keeps its cache in float32. Qwen3's has separate QKV projections, which both ways put together.
    convert(exports[name], tmp_path / "converted", kv_dtype="fp32")
    # The export computes the logits of the whole prompt. With int8, these many rows have a scale for each 256 columns;
    # the converted model's one row, the last token's, has one for each 32.
    for activations, first in (("bf16", 0), ("int8", 1)):
        found, placement = logits(genai, exports[name], report, activations=activations)
        assert placement["left"] == []
        assert len(placement["lowered"]) == 1
        assert "weights were repacked to Q4NX" in placement["lowered"][0]
        expected, _ = logits(genai, tmp_path / "converted", report, activations=activations)
        np.testing.assert_array_equal(found[first:], expected[first:], activations)


def test_blocks_of_16_are_quantised_again_and_said_to_be(
    genai: Any, exports: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    report = tmp_path / "placement.json"
    found, placement = logits(genai, exports["topics in blocks of 16"], report)
    assert placement["left"] == []
    (said,) = placement["lowered"]
    assert "31 of them are in blocks of 16, Q4NX's groups are 32: they were quantised again" in said
    convert(exports["topics in blocks of 16"], tmp_path / "converted", kv_dtype="fp32")
    assert "block_size=16: 25 weights: dequantised, and quantised again to Q4NX" in caplog.text
    quantisation = json.loads((tmp_path / "converted" / "flownpu_manifest.json").read_text())["quantisation"]
    assert list(quantisation["weights"]) == ["block_size=16"]
    expected, _ = logits(genai, tmp_path / "converted", report)
    # Both search for scales in the same way; with sums in another order, one group in thousands gets another scale that
    # is as good.
    assert np.linalg.norm(found - expected) < 0.01 * np.linalg.norm(expected)


def test_compiled_models_need_no_repacking(genai: Any, exports: dict[str, Path], tmp_path: Path) -> None:
    report = tmp_path / "placement.json"
    expected, _ = logits(genai, exports["gemma3"], report)
    assert main(["compile", str(exports["gemma3"]), str(tmp_path / "compiled")]) == 0
    found, placement = logits(genai, tmp_path / "compiled", report)
    assert placement["lowered"] == []
    np.testing.assert_array_equal(found, expected)


def _attribute(**changed: int) -> Any:
    def change(model: onnx.ModelProto) -> None:
        node = next(node for node in model.graph.node if "qkv_proj" in node.name and node.op_type == "MatMulNBits")
        kept = [attribute for attribute in node.attribute if attribute.name not in changed]
        del node.attribute[:]
        node.attribute.extend([*kept, *(onnx.helper.make_attribute(*item) for item in changed.items())])

    return change


def _to_custom(model: onnx.ModelProto) -> None:
    node = next(node for node in model.graph.node if node.op_type == "SkipSimplifiedLayerNormalization")
    node.domain = "somebody.else"
    model.opset_import.append(onnx.helper.make_opsetid("somebody.else", 1))


def _set_opset(version: int) -> Any:
    def change(model: onnx.ModelProto) -> None:
        next(opset for opset in model.opset_import if opset.domain == "").version = version

    return change


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_attribute(bits=2), "bits=2: Q4NX stores codes of 4 or 8 bits; export this weight with these"),
        (
            _attribute(weight_prepacked=1),
            "weight_prepacked=1: the codes are in an order made for a GPU; export without",
        ),
        # ONNX Runtime's own messages: it does not ask a provider about a model that it cannot load.
        (_to_custom, "somebody.else:SkipSimplifiedLayerNormalization(-1) is not a registered function/op"),
        (_set_opset(99), "Opset 99 is under development and support for this is limited"),
        (_set_opset(14), "No Op registered for Gelu with domain_version of 14"),
    ],
)
def test_unsupported_operator_is_refused_with_reason(
    genai: Any, exports: dict[str, Path], tmp_path: Path, change: Any, reason: str
) -> None:
    folder = shutil.copytree(exports["gemma3"], tmp_path / "changed")
    model = onnx.load(folder / "model.onnx", load_external_data=False)
    change(model)
    onnx.save(model, folder / "model.onnx")
    with pytest.raises(Exception, match="model") as raised:
        logits(genai, folder, tmp_path / "placement.json")
    assert reason in str(raised.value)


@pytest.mark.parametrize("name", ["gemma2", "gemma3", "llama", "qwen3", "topics"])
def test_build_and_session_find_same_decoder_in_export(
    exports: dict[str, Path], ep_devices: list[Any], tmp_path: Path, name: str
) -> None:
    shutil.copytree(exports[name], tmp_path / "model")
    assert assert_same_decoder(tmp_path / "model", ep_devices[:1]) == ""


def test_build_takes_export_that_session_takes(exports: dict[str, Path], ep_devices: list[Any], tmp_path: Path) -> None:
    """An export whose LM head gets the last token alone; its products are still the builder's."""
    folder = tmp_path / "model"
    shutil.copytree(exports["topics"], folder)
    model = ir.load(exports["topics"] / "model.onnx")
    apply_rules(model, Report(before=Counter()), ("flow_qkv_attention",))
    assert set_logits(model, "last")[0] == 1
    add_functions(model)
    assert "MatMulNBits" in {node.op_type for node in model.graph}
    ir.save(model, folder / "model.onnx", external_data="model.onnx.data")
    assert assert_same_decoder(folder, ep_devices[:1]) == ""


def test_build_gives_reasons_of_session_for_folded_export(folded: dict[str, Path], ep_devices: list[Any]) -> None:
    """Optimum's exports are no GenAI folders, so only the reasons about their graphs are compared."""
    for name, folder in folded.items():
        told = set()
        try:
            decoder_of_model(ir.load(folder / "model.onnx"), 64)
        except ValueError as error:
            told.add(str(error))
        by_session = told_by_session(folder / "model.onnx", ep_devices[:1])
        assert told <= by_session, name
        # Operators that would go to the array one by one lack artifacts.
        assert all("expected the compiled designs of this model" in said for said in by_session - told), name
