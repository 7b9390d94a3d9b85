# SPDX-License-Identifier: Apache-2.0
"""`flownpu explain --device gpu`: the nodes on the GPU, and those that its host keeps, with the reason."""

import json

import pytest

pytestmark = [pytest.mark.opencl, pytest.mark.usefixtures("pocl")]


def test_decoder_is_on_gpu(flownpu, model):
    done = flownpu("explain", model, "--device", "gpu", "--bandwidth", "10", "--json")
    assert done.code == 0, done.err
    placement = json.loads(done.out)["placement"]
    assert "gpu (" in placement["device"]
    assert "Portable Computing Language" in placement["device"]
    assert "6 layers and the LM head in 32 kernels a token" in placement["summary"]
    assert set(placement["counts"]) <= {"flownpu", "folded"}


def test_decoder_run_by_operators_has_reason(flownpu, models):
    done = flownpu("explain", models.converted("olmo2"), "--device", "gpu", "--bandwidth", "10", "--json")
    assert done.code == 0, done.err
    summary = json.loads(done.out)["placement"]["summary"]
    assert "operators by themselves, since " in summary
    assert "a norm of all heads at once" in summary


def test_explain_names_vulkan_device(flownpu, model, lavapipe):
    del lavapipe
    options = ("--device", "gpu", "--option", "gpu_api=vulkan", "--bandwidth", "10", "--json")
    done = flownpu("explain", model, *options)
    assert done.code == 0, done.err
    assert "gpu (llvmpipe" in json.loads(done.out)["placement"]["device"]


def test_explain_says_what_vulkan_device_lacks(flownpu, model, vulkan_double):
    vulkan_double.pretend("no shaderInt16")
    options = ("--device", "gpu", "--option", "gpu_api=vulkan", "--bandwidth", "10", "--json")
    done = flownpu("explain", model, *options)
    left = [node for node in json.loads(done.out)["placement"]["nodes"] if node["place"] == "host"]
    assert any("(without shaderInt16)" in node["reason"] for node in left)
