# SPDX-License-Identifier: Apache-2.0
"""`flownpu predict stable-diffusion-1.4`: the networks' nodes, and their prices."""

import json
from collections import Counter

import pytest

from flownpu.aie.cost.chips import CHIPS
from flownpu.aie.cost.parameters import VALUES
from flownpu.predict import pictures
from flownpu.predict.gpu import GPUS


def work(nodes):
    """By kind, (nodes, multiply-adds in 10^9, to one decimal) of one sample."""
    nodes = list(nodes)
    counts = Counter(node.kind for node in nodes)
    return {kind: (count, sum(node.multiply_adds for node in nodes if node.kind == kind) / 1e9) for kind, count in
            counts.items()}  # fmt: skip


def test_unet_has_known_nodes():
    """Counted by parameters and shapes of the published model, one sample; guidance takes two."""
    found = work(pictures.unet())
    assert {kind: (count, round(adds / 2, 1)) for kind, (count, adds) in found.items()} == {
        "3 x 3 convolutions": (52, 200.2),
        "1 x 1 convolutions": (46, 21.8),
        "products": (182, 116.6),  # 160 of tokens, 22 of the time
        "attention": (32, 63.0),
    }


def test_decoder_and_text_encoder_have_known_work():
    assert round(sum(adds for _, adds in work(pictures.decoder()).values())) == 1258
    assert sum(adds for _, adds in work(pictures.text_encoder()).values()) / 2 == pytest.approx(6.6, abs=0.1)


def test_picture_on_gpu_takes_its_arithmetic_and_less_by_winograd():
    """Arithmetic bounds all large nodes: 401.6 GMAC of a sample twice, at two operations each, and gaps and memory."""
    gpu = GPUS["radeon-890m"]
    windows, winograd = (pictures.predict_picture_on_gpu(gpu, winograd=way) for way in (False, True))
    arithmetic = 2 * 2 * 401.6e9 / gpu.floats
    assert arithmetic < windows["step"] < 1.1 * arithmetic
    # 200.2 GMAC of a sample are in 3 x 3 convolutions, all but some 3 % without strides, and become 16 / 36 at best.
    saved = 2 * 2 * 200.2e9 / gpu.floats * 20 / 36
    assert 0.8 * saved < windows["step"] - winograd["step"] < saved
    assert winograd["picture"] == pytest.approx(20 * winograd["step"] + winograd["decoder"] + winograd["text"])


@pytest.fixture
def few_nodes(monkeypatch):
    """A network of one node of each kind, because pricing the largest programs takes half a minute."""
    convolution = next(pictures.unet())
    products = [node for node in pictures.unet() if node.kind == "products"][1:2]
    attention = [node for node in pictures.unet() if node.kind == "attention"][:1]
    monkeypatch.setattr(pictures, "unet", lambda: iter([convolution, convolution, *products, *attention]))
    for name in ("decoder", "text_encoder"):
        monkeypatch.setattr(pictures, name, lambda: iter(()))


@pytest.mark.usefixtures("few_nodes")
@pytest.mark.parametrize("faster", ["array", "host"])
def test_nodes_are_those_of_the_faster(faster):
    values = {**VALUES, "host_products": 1e6 if faster == "array" else 1e18}
    found = pictures.predict_picture(CHIPS["kraken-350"], values)
    rows, on_array = found.networks["step"], faster == "array"
    assert (rows["3 x 3 convolutions"].nodes, rows["3 x 3 convolutions"].on_array) == (2, 2 * on_array)
    assert (rows["products"].on_array, rows["products"].changes) == (on_array, 2 * on_array)
    assert rows["attention"].on_array == 0
    assert rows["3 x 3 convolutions"].alone > 0
    if on_array:
        assert rows["products"].seconds > rows["products"].alone + 2 * VALUES["array_change"]
    assert found.picture == pytest.approx(pictures.STEPS * sum(row.seconds for row in rows.values()))


@pytest.mark.usefixtures("few_nodes")
def test_command_prints_tables_and_json(flownpu):
    done = flownpu("predict", "stable-diffusion-1.4")
    assert done.code == 0, done.err
    assert "Predicted, not measured" in done.out
    assert "published by ML Drift" in done.out
    document = json.loads(flownpu("predict", "stable-diffusion-1.4", "--json").out)
    step = sum(row["seconds"] for row in document["networks"]["step"].values())
    assert document["picture_seconds"] == pytest.approx(20 * step)
    done = flownpu("predict", "stable-diffusion-1.4", "--device", "gpu")
    assert done.code == 0, done.err
    assert "Radeon 780M" in done.out
    refused = flownpu("predict", "stable-diffusion-1.4", "--device", "gpu", "--weights", "q8")
    assert "expected no --context, --weights or --measured" in refused.err.replace("\n", " ")
    refused = flownpu("predict", "stable-diffusion-1.4", "--context", "1k")
    assert refused.code != 0
    assert "expected no --context" in refused.err.replace("\n", " ")
