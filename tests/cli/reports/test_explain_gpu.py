# SPDX-License-Identifier: Apache-2.0
"""`flownpu explain --device gpu`: what the GPU computes, and what it leaves to its host, with the reason."""

import json

import pytest

from flownpu.convert import convert
from tests.cli.conftest import CHECKPOINT

pytestmark = [pytest.mark.opencl, pytest.mark.usefixtures("pocl")]


def test_a_decoder_is_on_the_gpu(flownpu, model):
    done = flownpu("explain", model, "--device", "gpu", "--bandwidth", "10", "--json")
    assert done.code == 0, done.err
    placement = json.loads(done.out)["placement"]
    assert "gpu (" in placement["device"]
    assert "Portable Computing Language" in placement["device"]
    assert "6 layers and the LM head in 50 kernels a token" in placement["summary"]
    assert set(placement["counts"]) <= {"flownpu", "folded"}


def test_what_is_left_and_why(flownpu, tmp_path):
    convert(CHECKPOINT, tmp_path / "model", kv_dtype="int8")
    done = flownpu("explain", tmp_path / "model", "--device", "gpu", "--bandwidth", "10", "--json")
    assert done.code == 0, done.err
    left = [node for node in json.loads(done.out)["placement"]["nodes"] if node["place"] == "host"]
    assert {node["operator"].rpartition(":")[2] for node in left} >= {"FlowQKVAttention", "Q4NXMatMul"}
    assert all("a KV cache in bf16, fp16 or fp32, got int8" in node["reason"] for node in left)
