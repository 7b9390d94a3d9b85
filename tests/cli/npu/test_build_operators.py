# SPDX-License-Identifier: Apache-2.0
"""`flownpu build` of models that are no decoders: programs of their operators, and the reasons for missing ones."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from flownpu.ops import q4nx
from tests.end_to_end.emulated_operators import write_node
from tests.ops.stock_onnxruntime import model_of, node, value, with_functions


@pytest.fixture
def product(tmp_path: Path) -> Path:
    """A product of 128 x 64, in a file."""
    blocks = q4nx.pack(*q4nx.quantize(np.ones((128, 64), np.float32)))
    x = np.ones((2, 64), np.float32)
    return write_node(tmp_path / "model.onnx", "Q4NXMatMul", {"X": x}, {"W": blocks}, M=128, K=64)


@pytest.mark.parametrize("of", ["file", "folder"])
def test_model_for_onnxruntime_alone_is_built(of: str, flownpu: Any, product: Path) -> None:
    """Artifacts are beside the model's file, where a session looks for them; a second build makes nothing."""
    given = product if of == "file" else product.parent
    done = flownpu("build", given, "--for", "emulate", "--json")
    assert done.code == 0
    told = json.loads(done.out)
    assert told["folder"] == str(product.parent / "artifacts" / "emulate")
    assert (told["context"], told["left_out"]) == (0, [])
    programs = json.loads((product.parent / "artifacts" / "emulate" / "manifest.json").read_text())["programs"]
    assert [(program["kind"], program["tokens"], len(program["dispatches"])) for program in programs] == [
        ("q4nx_matmul", 1, 1), *(("q4nx_matmul", rows, 2) for rows in (64, 256, 1024, 4096)),
    ]  # fmt: skip
    assert json.loads(flownpu("build", given, "--for", "emulate", "--json").out)["made"] == 0


def test_model_without_array_operators_is_refused(flownpu: Any, tmp_path: Path) -> None:
    file = write_node(
        tmp_path / "model.onnx", "FlowQKVAttention", {"query": np.ones((1, 4, 288), np.float32)}, outputs=3,
        num_heads=3, kv_num_heads=3, head_size=32, causal=0, softcap=1.0,
    )  # fmt: skip
    done = flownpu("build", file, "--for", "emulate")
    assert done.code == 1
    assert "expected no softcap, which the array's attention has not" in done.err.replace("\n", " ")
    assert not (tmp_path / "artifacts").exists()


@pytest.mark.parametrize("stays", [False, True])
def test_unfit_operators_stay_on_host_only_with_leave(stays: bool, flownpu: Any, tmp_path: Path) -> None:
    """A query of 32 heads of 256 is more than `flow_kv`'s tiles hold, but `flow_qkv` also takes one token.

    No design has a softcap, so an attention with one stays on the host.
    """
    query = value("query", np.ones((1, 4, 34 * 256), np.float32))
    sizes = {"num_heads": 32, "kv_num_heads": 1, "head_size": 256, "causal": 0}
    nodes = [node("FlowQKVAttention", [query], 3, **sizes)]
    nodes += [node("FlowQKVAttention", [query], 3, **sizes, softcap=1.0)] * stays
    ir.save(with_functions(model_of(nodes, [query])), tmp_path / "model.onnx")
    arguments = ("build", tmp_path / "model.onnx", "--for", "emulate", "--context", 64)
    done = flownpu(*arguments)
    assert done.code == 0, done.err
    assert "left out: flow_qkv_attention of" in done.err
    assert ("softcap" in done.err, "on_unsupported=cpu" in done.err) == (stays, stays)
    left_out = json.loads(flownpu(*arguments, "--json").out)["left_out"]
    assert [left["on_host"] for left in left_out] == [True] * stays + [False]
    assert "1 rows" in left_out[-1]["what"]
