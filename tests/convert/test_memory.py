# SPDX-License-Identifier: Apache-2.0
"""Weights are read, quantised and written in parts. Only an export's weights are ever whole in memory, in Q4NX."""

import json
import tracemalloc
from pathlib import Path

import numpy as np
import onnx
import pytest
from gguf.constants import GGMLQuantizationType as Type

from flownpu.convert import convert, quantise
from flownpu.convert.export_q4nx import export_q4nx
from flownpu.convert.graph import data_file
from flownpu.model import integrity
from tests.convert.conftest import write_tiny
from tests.convert.sources.gguf_files import write_gguf

VOCABULARY, HIDDEN = 32000, 96
# Bytes of the smallest form that any of these conversions makes of the embedding: Q4NX without minima, 4.5 bits each.
SMALLEST_FORM = VOCABULARY * HIDDEN * 9 // 16


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("sources")
    sizes = {"vocab_size": VOCABULARY, "num_hidden_layers": 1, "tie_word_embeddings": True}
    tiny = write_tiny("llama", folder / "checkpoint", **sizes)
    write_gguf(folder / "q4_0.gguf", tiny.reference)
    write_gguf(folder / "q8_0.gguf", tiny.reference, type_of=lambda _: Type.Q8_0)
    for source in ("checkpoint", "q4_0.gguf"):  # both, so that their imports are not measured later
        convert(folder / source, folder / "model", force=True)
    return {path.stem: path for path in folder.iterdir()}


@pytest.mark.parametrize("source", ["checkpoint", "q4_0", "q8_0", "model"])
def test_peak_memory_is_below_smallest_form(
    source: str, sources: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Parts are made smaller than the default, as this model is smaller than real ones.
    monkeypatch.setattr(quantise, "_WEIGHTS_AT_ONCE", 128 * HIDDEN)
    # Fixed, because every core has a part in memory.
    monkeypatch.setattr(quantise, "usable_cores", lambda: 2)
    monkeypatch.setattr(integrity, "_READ_AT_ONCE", 1 << 16)
    monkeypatch.setattr(data_file, "_LARGE_PAGE", 1 << 16)
    tracemalloc.start()
    try:
        if source == "model":
            export_q4nx(sources[source], tmp_path / "model.q4nx")
        else:
            convert(sources[source], tmp_path / "model")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < SMALLEST_FORM


PRODUCTS = {"optimum": "MatMul (x, weight)", "genai": "com.microsoft.MatMulNBits <{sizes}> (x, codes, scales)"}


def write_export(folder: Path, kind: str) -> None:
    """An LM head as an exporter writes it, its weights in a file of their own."""
    rng = np.random.default_rng(2)
    product = PRODUCTS[kind].format(sizes=f"K = {HIDDEN}, N = {VOCABULARY}, block_size = 32")
    header = '<ir_version: 10, opset_import: ["": 21, "com.microsoft": 1]>'
    model = onnx.parser.parse_model(
        f"{header} head (float[B, S, {HIDDEN}] x) => (float[B, S, {VOCABULARY}] logits) {{ logits = {product} }}"
    )
    constants = {
        "weight": rng.standard_normal((HIDDEN, VOCABULARY), np.float32),
        "codes": rng.integers(0, 256, (VOCABULARY, HIDDEN // 32, 16), np.uint8),
        "scales": rng.uniform(1, 2, (VOCABULARY, HIDDEN // 32)).astype(np.float32),
    }
    used = {name: array for name, array in constants.items() if name in product}
    model.graph.initializer.extend(onnx.numpy_helper.from_array(array, name) for name, array in used.items())
    folder.mkdir()
    onnx.save(model, folder / "model.onnx", save_as_external_data=True, location="model.onnx.data")
    name, settings = {"optimum": ("config.json", {}), "genai": ("genai_config.json", {"model": {"decoder": {}}})}[kind]
    (folder / name).write_text(json.dumps(settings))


@pytest.mark.parametrize("kind", PRODUCTS)
def test_export_peak_memory_is_within_bound(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_export(tmp_path / kind, kind)
    monkeypatch.setattr(integrity, "_READ_AT_ONCE", 1 << 16)
    monkeypatch.setattr(data_file, "_LARGE_PAGE", 1 << 16)
    convert(tmp_path / kind, tmp_path / "before")  # so that imports are not measured
    tracemalloc.start()
    try:
        convert(tmp_path / kind, tmp_path / "model")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # The weight is whole in memory in Q4NX only: in float32, or unpacked, it would take more than three times as much.
    assert 3 * SMALLEST_FORM < VOCABULARY * HIDDEN * 4
    assert SMALLEST_FORM < peak < 3 * SMALLEST_FORM
