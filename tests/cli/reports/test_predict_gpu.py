# SPDX-License-Identifier: Apache-2.0
"""`flownpu predict` for a GPU: the bound of memory and arithmetic, computed by hand."""

import json
from pathlib import Path

import pytest

from flownpu import _native
from flownpu.predict.gpu import _DELTA_CHUNK, CHUNK, GPUS, kernels, predict_gpu
from flownpu.predict.target import known

RADEON = GPUS["radeon-780m"]
# Gemma3-1B: 26 layers, D 1152, H 4, G 1, d 256, I 6912, V 262144; windows of 512 but in every sixth layer.
LAYER = 1152 * (6 * 256) + (4 * 256) * 1152 + 3 * 1152 * 6912
PRODUCTS = 26 * LAYER + 262144 * 1152


def test_token_reads_weights_and_visible_keys():
    """5 bits a weight, and the keys and values, 16 bits each, that its windows let it see."""
    token = list(kernels(known("gemma3-1b").decoder, 1023, 1, head=True))
    assert len(token) == 5 * 26 + 2  # as many launches as ForwardPass::dispatches_of says
    seen = sum(1024 if layer % 6 == 5 else 512 for layer in range(26))
    least = PRODUCTS * 5 / 8 + seen * 2 * 256 * 2
    # The rest are activations: about a megabyte of logits, and some kilobytes a kernel.
    assert least < sum(kernel.bytes for kernel in token) < least + 5e6


def test_token_time_is_bound_by_memory():
    (point,) = predict_gpu(known("gemma3-1b"), RADEON, [1024])
    assert point.roof == pytest.approx(RADEON.read / point.read_bytes)
    assert point.decode_tokens_per_second < point.roof
    # A token takes the time of memory, or of float arithmetic (4 operations a weight) where that is slower, and the
    # gaps of 132 launches.
    gaps = 132 * RADEON.GAP
    slower = max(point.read_bytes / RADEON.read, 4 * PRODUCTS / RADEON.floats)
    assert 1 / point.decode_tokens_per_second == pytest.approx(slower + gaps, rel=0.05)


def test_layers_with_states_have_their_launches():
    """Qwen 3.5-0.8B: 18 layers of 16 heads, 128 x 128, by the delta rule, and 6 of attention with an output gate."""
    decoder = known("qwen3.5-0.8b").decoder
    token = list(kernels(decoder, 1023, 1, head=True))
    assert len(token) == 18 * (4 + 6) + 6 * (4 + 4) + 2  # as many launches as ForwardPass::dispatches_of says
    prompt = list(kernels(decoder, 0, CHUNK, head=True))
    # Beside the products, each of two kernels: convolution, rates, pairs, chunks, the gated norm; append, attention,
    # gate; two norms a layer, one before the first; the head.
    assert len(prompt) == 18 * (5 * 2 + 5 + 2) + 6 * (5 * 2 + 3 + 2) + 2
    state = 16 * 128 * 128
    rules = [kernel for kernel in token if kernel.name == "delta rule"]
    least = 18 * 2 * state * 4  # states are read and written
    assert least < sum(kernel.bytes for kernel in rules) < 1.02 * least
    assert sum(kernel.floats for kernel in rules) == 18 * 8 * state
    # A column of a head: a key's, a query's and a change's product with 128 rows for each token, those with 16 tokens
    # twice, and the decay of the rows once for 16 tokens.
    chunks = sum(kernel.floats for kernel in prompt if kernel.name == "delta rule: chunks")
    assert chunks == 18 * CHUNK * 16 * 128 * 2 * (3 * 128 + 2 * 16 + 128 / 16)


def test_prompt_time_is_bound_by_arithmetic():
    """A launch takes at least the longer of moving and computing, and at most both one after the other."""
    decoder = known("gemma3-1b").decoder
    (point,) = predict_gpu(known("gemma3-1b"), RADEON, [1024])
    launches = [
        kernel for past in range(0, 1024, CHUNK) for kernel in kernels(decoder, past, CHUNK, head=past == 1024 - CHUNK)
    ]
    # A chunk is a norm; 4 products, each of two kernels, append, attention and 2 norms a layer. The head is the last.
    assert len(launches) == 4 * (1 + 26 * (8 + 4)) + 1
    assert sum(kernel.dots for kernel in launches) == 2 * 1024 * 26 * LAYER
    # A causal prompt's keys, windows of 512: 4 operations for each element of a query, by matrix units.
    seen = sum(min(token + 1, 1024 if layer % 6 == 5 else 512) for layer in range(26) for token in range(1024))
    assert sum(kernel.halves for kernel in launches) == 4 * seen * 4 * 256
    # Weights are read for each chunk, in 5 bits; the head's once.
    moved = sum(kernel.bytes for kernel in launches)
    assert moved > (4 * 26 * LAYER + 262144 * 1152) * 5 / 8
    read = moved / RADEON.read
    computed = sum(
        kernel.floats / RADEON.floats + kernel.dots / RADEON.dots + kernel.halves / RADEON.halves for kernel in launches
    )
    gaps = len(launches) * RADEON.GAP
    assert max(read, computed) < point.ttft_seconds - gaps < read + computed
    assert computed > read
    assert point.prefill_tokens_per_second == 1024 / point.ttft_seconds


def test_weights_of_eight_bits_are_read(flownpu):
    """8.5 bits in place of 5, of attention alone, and of all."""
    reads = [
        json.loads(flownpu("predict", "gemma3-1b", "--device", RADEON.name, "--context", "1k", "--json", *given).out)[
            "devices"
        ][RADEON.name][0]["read_bytes"]
        for given in ((), ("--weights", "8/4/4"), ("--weights", "q8"))
    ]
    attention = 26 * (1152 * (6 * 256) + (4 * 256) * 1152)
    assert [read - reads[0] for read in reads[1:]] == pytest.approx([attention * 3.5 / 8, PRODUCTS * 3.5 / 8])


def test_predicted_chunks_equal_session_chunks():
    """A chunk of the prediction has ForwardPass::kMostTokens tokens."""
    source = (Path(__file__).parents[3] / "ops/gpu/decoder/forward_pass.h").read_text()
    assert f"kMostTokens = {CHUNK};" in source
    source = (Path(__file__).parents[3] / "ops/gpu/kernels/states/kernels.h").read_text()
    assert f"kDeltaChunk = {_DELTA_CHUNK};" in source


def test_gpu_prediction_is_in_json(flownpu):
    done = flownpu("predict", "gemma3-1b", "--device", "gpu", "--context", "1k,2k")
    assert done.code == 0, done.err
    assert done.out.count("Predicted, not measured: as fast as memory and arithmetic permit at most") == 2
    assert "Radeon 890M" in done.out
    document = json.loads(flownpu("predict", "gemma3-1b", "--device", "radeon-780m", "--context", "1k", "--json").out)
    assert document["predicted"] is True
    assert list(document["devices"]) == ["radeon-780m"]
    (point,) = document["devices"]["radeon-780m"]
    assert point["context"] == 1024


def test_pair_is_priced_from_its_devices(flownpu):
    """A prompt of 1k on one and 128 tokens on the other, the switch between; joules at published watts (table 5)."""
    given = ("gemma3-1b", "--context", "1k", "--json", "--device", "kraken-350+radeon-890m")
    found = json.loads(flownpu("predict", *given).out)
    (pair,), speed, energy = found["points"], found["speed"], found["energy"]
    (gpu,) = predict_gpu(known("gemma3-1b"), GPUS["radeon-890m"], [1024])
    # In 22 layers with a window of 512 the next token sees 511 of the prompt; keys and values have 512 bytes each.
    assert pair["handed_over_bytes"] == (22 * 511 + 4 * 1024) * 2 * 512
    assert pair["decode_tokens_per_second"] == pytest.approx(gpu.decode_tokens_per_second)
    prompt = pair["ttft_seconds"], gpu.ttft_seconds
    tokens = speed["costs"]["kraken-350"] - prompt[0], 128 / gpu.decode_tokens_per_second
    switched = prompt[1] + tokens[0] + pair["handed_over_seconds"]
    assert speed["costs"] == pytest.approx(
        {"radeon-890m": prompt[1] + tokens[1], "radeon-890m+kraken-350": switched, "kraken-350": prompt[0] + tokens[0]}
    )
    assert (speed["device"], speed["threshold"]) == ("radeon-890m", None)
    # No prompt takes fewer joules on the GPU, so that the other pair is none.
    assert energy["costs"] == pytest.approx(
        {
            "kraken-350": 4.3 * prompt[0] + 4.6 * tokens[0],
            "kraken-350+radeon-890m": 4.3 * prompt[0] + 53 * tokens[1],
            "radeon-890m": 57 * prompt[1] + 53 * tokens[1],
        }
    )
    assert energy["device"] == "kraken-350"


def test_sessions_find_predicted_prices(flownpu, model_copy):
    """Under the names that sessions give the devices; without watts there are no joules."""
    given = ("--device", "kraken-350+radeon-890m", "--context", "64", "--write", "--json")
    speed = json.loads(flownpu("predict", model_copy, *given).out)["speed"]
    config = json.loads((model_copy / "genai_config.json").read_text())
    ((options,),) = (entry.values() for entry in config["model"]["decoder"]["session_options"]["provider_options"])
    assert (options["device"], options["prefer"]) == ("auto", "speed")
    heading, npu, gpu, switch = options["prices"].split(" | ")
    assert heading == "predicted seconds prompt=64 answer=128"
    assert (npu.split()[0], gpu.split()[0], switch.split()[0]) == ("npu", "gpu", "switch")
    device, threshold, costs = _native.choose_stages(options["prices"])
    names = {"npu": "kraken-350", "gpu": "radeon-890m"}
    assert {"+".join(names[part] for part in name.split("+")): cost for name, cost in costs} == speed["costs"]
    assert ("+".join(names[part] for part in device.split("+")), threshold) == (speed["device"], speed["threshold"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("--device", "kraken-350+radeon-890m", "--write"),
            "expected a folder with genai_config.json, and two",
        ),
        (("--device", "radeon-790m"), "no such GPU: radeon-790m; did you mean radeon-"),
        (("--device", "gpu", "--measured", "x"), "expected no --measured with a GPU"),
        (("--device", "gpu", "--kv-dtype", "int8"), "expected no --kv-dtype int8 with a GPU"),
        (("--device", "gpu", "--context", "900k"), "expected contexts of 1 to 32768 tokens"),
    ],
)
def test_unfit_arguments_are_refused(arguments, message, flownpu):
    done = flownpu("predict", "gemma3-1b", *arguments)
    assert done.code != 0
    assert message in " ".join(done.err.replace("│", "").split())
