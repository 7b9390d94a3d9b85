# SPDX-License-Identifier: Apache-2.0
"""`flownpu embed` and `flownpu rerank` as commands."""

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from flownpu.cli import main
from flownpu.cli.embedding.texts import read_texts
from tests.embed.checkpoints import SENTENCES
from tests.embed.conftest import Model

ON_CPU = ["--device", "cpu", "--activations", "bf16"]


def test_embed_writes_vectors(
    model: Callable[[str], Model], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = str(model("bert-mean").folder)
    texts = [*SENTENCES, "word " * 200]
    assert main(["embed", folder, *texts, *ON_CPU]) == 0
    printed = capsys.readouterr()
    lines = [json.loads(line) for line in printed.out.splitlines()]
    assert [line["cut"] for line in lines] == [False] * len(SENTENCES) + [True]
    assert f"cut there: number {len(texts)}" in printed.err
    assert "FlowNPU:" in printed.err
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("\n".join(texts).encode())))
    assert main(["embed", folder, "-o", str(tmp_path / "made.npy"), *ON_CPU]) == 0
    np.testing.assert_array_equal(np.load(tmp_path / "made.npy"), np.array([line["embedding"] for line in lines], "f4"))


def test_lines_of_stdin_end_at_line_ends_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other characters at which Python's splitlines splits belong to a text, so that results keep their line."""
    given = ["one\x0cone", "two\N{LINE SEPARATOR}two", "", "four\x85\x1c"]
    for end in ("\n", "\r\n"):
        for last in ("", end):
            content = (end.join(given) + last).encode()
            monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
            assert read_texts(None) == given


def test_rerank_sorts_by_logit(model: Callable[[str], Model], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rerank", str(model("bert-score").folder), "-q", "a river", *SENTENCES, "--json", *ON_CPU]) == 0
    results = json.loads(capsys.readouterr().out)["results"]
    assert sorted(one["index"] for one in results) == list(range(len(SENTENCES)))
    assert [one["logit"] for one in results] == sorted((one["logit"] for one in results), reverse=True)


def test_models_of_other_kind_are_refused(model: Callable[[str], Model], capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(model("bert-mean").folder)
    assert main(["run", folder, "-p", "x"]) == 1
    assert "a model that embeds texts, and this needs one that generates: `flownpu embed`" in capsys.readouterr().err
    assert main(["embed", folder, "x", "--provider", "cpu", "--device", "cpu"]) == 1
    assert "leave one of the two out" in capsys.readouterr().err
    assert main(["embed", str(model("bert-score").checkpoint), "x"]) == 1
    assert "modules.json" in capsys.readouterr().err
