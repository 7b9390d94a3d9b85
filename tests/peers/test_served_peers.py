# SPDX-License-Identifier: Apache-2.0
"""The server of each installed peer answers the clients of `flownpu bench --serve`."""

import subprocess
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import openai
import pytest

from flownpu.bench.crowd import Crowd, ask_all
from flownpu.bench.measurement import Engine
from flownpu.bench.servers import running
from flownpu.peers import llama_cpp, servers
from flownpu.peers.environment import MARKER, cache_folder
from tests.convert.test_numbers import random_ids
from tests.peers.test_converters import FOR_LLAMA_CPP, Exported, exported

__all__ = ["exported"]  # a fixture


def test_tokens_have_texts(exported: Exported, tmp_path: Path):
    model, _ = exported("gemma3_text", **FOR_LLAMA_CPP["gemma3_text"])
    llama_cpp.convert_served(model, tmp_path)
    reader = gguf.GGUFReader(tmp_path / "model-q4_0.gguf")
    texts = reader.get_field("tokenizer.ggml.tokens").contents()
    assert len(texts) == model.vocabulary_size == 300
    assert (texts[1], texts[3], texts[258], texts[299]) == ("<eos>", "<0x00>", "<0xFF>", "<299>")
    assert reader.get_field("tokenizer.ggml.token_type").contents()[256:260] == [6, 6, 6, 1]


@pytest.mark.parametrize("name", servers.SERVED)
def test_peer_server_generates_expected_tokens(
    name: str, exported: Exported, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    environment = cache_folder() / f"{name}-server" / "environment"
    if not (environment / MARKER).is_file():
        pytest.skip(f"{name} is not installed: `flownpu bench MODEL --serve --against {name}` does it")
    model, tiny = exported("gemma3_text", **FOR_LLAMA_CPP["gemma3_text"])

    def prepared(_name, _model, *, peer, verb, **_):
        python = environment / "bin" / "python"
        worker = peer.script.with_name("worker.py")
        subprocess.run([python, "-P", worker, peer.script, verb, model.folder, tmp_path], check=True)
        return Engine(name, python, peer.script, tmp_path)

    monkeypatch.setattr(servers, "prepare", prepared)
    hears = {"say": lambda _: None, "progress": lambda *_: None}
    server = servers.peer_server(name, tmp_path, threads=1, context=80, clients=2, **hears)
    if name == "llama.cpp":
        # Without its kernels for AMX, which crash with SIGSEGV on some virtual machines.
        server = replace(server, command=(*server.command, "--no-repack"))
    # The first of these prompts whose likeliest next token is clear, and is no byte's.
    ids = next(
        found
        for found in (random_ids(1, 40 + extra)[0] for extra in range(20))
        if np.diff(np.sort(tiny.logits(found[None])[0, -1])[-2:])[0] > 0.2
        and tiny.logits(found[None])[0, -1].argmax() > 258
    )
    with running(server) as (service, _):
        client = openai.OpenAI(base_url=service.url, api_key="none", max_retries=0)
        stream = client.completions.create(
            model=service.model, prompt=ids.tolist(), max_tokens=1, temperature=0, stream=True
        )
        text = "".join(chunk.choices[0].text for chunk in stream if chunk.choices)
        assert text.strip() == f"<{tiny.logits(ids[None])[0, -1].argmax()}>"
        _, answers = ask_all(service, Crowd(2, (8, 20), 5), vocabulary_size=300, seed=1)
        assert [answer.failure for answer in answers] == [""] * 4
        assert max(answer.tokens for answer in answers) == 5
