# SPDX-License-Identifier: Apache-2.0
"""`flownpu explain` and `flownpu verify` of real exporters' models."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flownpu.cli import main
from flownpu.convert import convert

tokenizers = pytest.importorskip("tokenizers", reason="needs the extra verify")

NAMES = ["gemma3", "llama", "qwen3"]  # fused QKV, zero points, separate QKV


def document(capfd: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, dict[str, Any]]:
    capfd.readouterr()
    code = main([*map(str, arguments), "--json"])
    captured = capfd.readouterr()
    assert captured.out, captured.err
    return code, json.loads(captured.out)


def test_optimum_export_names_left_nodes(optimum_exports: dict[str, Path], capfd: pytest.CaptureFixture[str]) -> None:
    code, found = document(capfd, "explain", optimum_exports["bert"], "--device", "cpu", "--bandwidth", 10)
    assert (code, found["source"]) == (0, "plain")
    left = [node for node in found["placement"]["nodes"] if node["place"] == "cpu"]
    assert left == []  # although it is not converted: the device also computes GELU's Erf
    assert {attention["kind"] for attention in found["attentions"]} == {"MHA"}
    assert any("less than 32" in miss["reason"] for miss in found["misses"])  # the token types' table has 2 rows


@pytest.mark.parametrize("name", NAMES)
def test_converted_export_equals_source(
    exports: dict[str, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str], name: str
) -> None:
    convert(exports[name], tmp_path / "model")
    code, found = document(capfd, "verify", tmp_path / "model", "--against", exports[name], "--device", "cpu")
    assert code == 0
    assert found["first_divergence"] is None
    assert all(np.isfinite(stage["tolerance"]) and stage["tolerance"] < 0.2 for stage in found["stages"])


@pytest.mark.parametrize("name", ["gemma2", "qwen3"])  # norms before and behind each part; norms of heads
def test_folded_export_equals_definitions(
    folded: dict[str, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str], name: str
) -> None:
    folder = shutil.copytree(folded[name], tmp_path / "model")
    letters = tokenizers.models.WordLevel({chr(97 + i): 5 + i for i in range(26)})
    tokenizer = tokenizers.Tokenizer(letters)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    tokenizer.save(str(folder / "tokenizer.json"))
    arguments = ("--device", "cpu", "--text", 8 * "silverlake")
    code, found = document(capfd, "verify", folder, "--against", folder, *arguments)
    assert code == 0
    layers = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
    assert len(found["stages"]) == 1 + layers + 1


def test_export_of_another_model_diverges_everywhere(
    exports: dict[str, Path], model_of_other_codes: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code, found = document(capfd, "verify", model_of_other_codes, "--against", exports["topics"], "--device", "cpu")
    assert code == 1
    assert all(stage["diverges"] for stage in found["stages"])


@pytest.fixture
def model_of_other_codes(exports: dict[str, Path], tmp_path: Path) -> Path:
    """The checkpoint that `topics` was exported from, quantised by FlowNPU: with minima, where the builder has none."""
    from tests.rewrites.conftest import TOPICS

    assert exports["topics"].is_dir()
    convert(TOPICS, tmp_path / "other")
    return tmp_path / "other"
