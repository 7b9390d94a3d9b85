# SPDX-License-Identifier: Apache-2.0
"""Weights are read, quantised and written in parts: no weight is ever whole in memory."""

import tracemalloc
from pathlib import Path

import pytest
from gguf.constants import GGMLQuantizationType as Type

from flownpu import integrity
from flownpu.convert import convert, quantise
from flownpu.convert.export_q4nx import export_q4nx
from tests.convert.conftest import write_tiny
from tests.convert.gguf_files import write_gguf

VOCABULARY, HIDDEN = 32000, 96
# In the smallest form that any of these conversions makes of the embedding: Q4NX, 4 bits and 1 of scales, and columns
# padded to 256.
SMALLEST_FORM = VOCABULARY * 256 * 5 // 8


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("sources")
    sizes = {"vocab_size": VOCABULARY, "num_hidden_layers": 1, "tie_word_embeddings": True}
    tiny = write_tiny("llama", folder / "checkpoint", **sizes)
    write_gguf(folder / "q4_0.gguf", tiny.reference)
    write_gguf(folder / "q8_0.gguf", tiny.reference, type_of=lambda _: Type.Q8_0)
    convert(folder / "q4_0.gguf", folder / "model")
    return {path.stem: path for path in folder.iterdir()}


@pytest.mark.parametrize("source", ["checkpoint", "q4_0", "q8_0", "model"])
def test_peak(source: str, sources: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # As much smaller than what is taken at once as this model is than those that people bring.
    monkeypatch.setattr(quantise, "_WEIGHTS_AT_ONCE", 512 * HIDDEN)
    # Every core has a part in memory.
    monkeypatch.setattr(quantise.os, "sched_getaffinity", lambda _: {0, 1}, raising=False)
    monkeypatch.setattr(integrity, "_READ_AT_ONCE", 1 << 16)
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
