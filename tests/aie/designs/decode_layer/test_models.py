# SPDX-License-Identifier: Apache-2.0
"""The decode layer with models' weights: tokens on the emulator, and its float64 reference against transformers."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors import safe_open

from flownpu.aie.designs.decode_layer.design import CalledLayer, DecodeLayer, LayerShape
from flownpu.ops import q4nx
from flownpu.selftest.reference.layer import LayerInputs, expectation, rotary_table
from tests.aie.designs.decode_layer.cases import case_of, checkpoint_layer, norm_weights, run
from tests.aie.emulation import emulator, plan_of
from tests.aie.host_kernels import BFLOAT16, assert_within, bf16

CHECKPOINT = Path(__file__).parents[3] / "fixtures" / "gemma3-topics"
CAPACITY = 256
SIZES = {
    "hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 288,
    "num_hidden_layers": 2, "vocab_size": 256, "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
}  # fmt: skip


class Model:
    """A model in float64 with weights that Q4NX and bf16 hold exactly, and the same weights for the array."""

    def __init__(self, config, tensors):
        self.config = config
        gemma = config.model_type.startswith("gemma3")
        self.shape = LayerShape(
            config.hidden_size, config.num_attention_heads, config.num_key_value_heads, config.head_dim,
            config.intermediate_size, "geglu" if gemma else "swiglu", gemma, gemma or config.model_type == "qwen3",
        )  # fmt: skip
        count = config.num_hidden_layers
        self.weights = [checkpoint_layer(self.shape, tensors, index) for index in range(count)]
        self.embedding = q4nx.pack(*q4nx.quantize(tensors["model.embed_tokens.weight"]))
        last = [f"model.layers.{count - 1}.post_feedforward_layernorm.weight"] if gemma else []
        self.final_norms = norm_weights(self.shape, np.stack([tensors[n] for n in [*last, "model.norm.weight"]]))
        held = {name: self._held(values) for name, values in tensors.items()}
        self.torch = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").double().eval()
        state = {name: torch.from_numpy(values.astype(np.float64)) for name, values in held.items()}
        assert self.torch.load_state_dict(state, strict=False).unexpected_keys == []

    def _held(self, values):
        if values.ndim == 2:
            return q4nx.dequantize(q4nx.pack(*q4nx.quantize(values)), *values.shape)
        return norm_weights(self.shape, values).astype(np.float32) - (1 if self.shape.post_norms else 0)

    def call(self, position, token, cache):
        """The inputs of a token's call: all layers and the LM head."""
        config, shape = self.config, self.shape
        kinds = getattr(config, "layer_types", None) or ["full_attention"] * len(self.weights)
        layers = [
            CalledLayer(config.sliding_window, 0) if kind == "sliding_attention" else CalledLayer(None, 1)
            for kind in kinds
        ]
        rope = config.rope_parameters
        bases = [rope.get(kind, rope)["rope_theta"] for kind in ("sliding_attention", "full_attention")]
        vocabulary = config.vocab_size
        embedded = q4nx.dequantize(self.embedding, vocabulary, shape.hidden)[token]
        return LayerInputs(
            DecodeLayer(shape), self.weights, layers, position,
            bf16(embedded * shape.hidden**0.5 if shape.post_norms else embedded), np.zeros(shape.hidden, BFLOAT16),
            cache, np.stack([rotary_table(CAPACITY, shape.d, base) for base in bases]),
            getattr(config, "query_pre_attn_scalar", shape.d) ** -0.5, self.final_norms, self.embedding, vocabulary,
        )  # fmt: skip

    def cache(self, dtype):
        """An empty cache, [layers, capacity, KV heads, 2, d]."""
        return np.zeros((len(self.weights), CAPACITY, self.shape.kv_heads, 2, self.shape.d), dtype)


def trained():
    config = transformers.AutoConfig.from_pretrained(CHECKPOINT)
    with safe_open(CHECKPOINT / "model.safetensors", "np") as file:
        return Model(config, {name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118 (no mapping)


def untrained(config):
    torch.manual_seed(0)
    made = transformers.AutoModelForCausalLM.from_config(config)
    parameters = {name: value.detach().numpy() for name, value in made.state_dict().items() if name != "lm_head.weight"}
    noise = np.random.default_rng(0)
    norms = {n: v + noise.uniform(-0.3, 0.3, v.shape).astype(np.float32) for n, v in parameters.items() if v.ndim == 1}
    return Model(config, parameters | norms)


MODELS = {
    "gemma3": trained,
    "llama": lambda: untrained(transformers.LlamaConfig(**SIZES)),
    "qwen3": lambda: untrained(transformers.Qwen3Config(**SIZES)),
}


@pytest.fixture(scope="module", params=MODELS)
def model(request):
    return MODELS[request.param]()


def test_reference_equals_transformers(rng, model):
    """In float64, token after token, against transformers.

    Only the tables of angles and the embedding differ: here they are rounded to bf16, as they are for the array. The
    array's own tolerance has room for these two roundings.
    """
    tokens = rng.integers(3, model.config.vocab_size, 6)
    with torch.no_grad():
        expected = model.torch(torch.from_numpy(tokens)[None]).logits[0].numpy()
    cache = model.cache(np.float64)
    for position, token in enumerate(tokens):
        found = expectation(model.call(position, int(token), cache), rng)
        logits, tolerance = found["logits"]
        assert_within(logits, expected[position], tolerance)
        cache[:, position] = found["position"][0].reshape(cache[:, position].shape)


@pytest.mark.parametrize("position", [0, 40, 200])
def test_token_of_whole_model_equals_float64(rng, model, position):
    """All layers and the LM head in one call, over a cache of random numbers of the size of real keys and values."""
    case_of(model.call(position, 7, bf16(rng.normal(size=model.cache(np.float32).shape))), rng).check()


def test_schedules_give_same_logits(model):
    """The calls follow one another at once, and these layers' last projection has fewer rows than there are streams."""
    call = model.call(3, 7, model.cache(BFLOAT16))
    call = dataclasses.replace(call, weights=call.weights[:2], layers=call.layers[:2], cache=call.cache[:2])
    plan, buffers = plan_of(call.program()), call.buffers()
    array = emulator(plan.array)
    first = run(array, plan, **buffers)
    for seed in range(1, 101):
        found = run(array, plan, seed=seed, settle=False, **buffers)
        assert all(found[key].tobytes() == first[key].tobytes() for key in first), f"schedule {seed}"


@pytest.mark.parametrize(("way", "vocabulary"), [("pairs", 256), ("split", 256), ("split", 512)])
def test_late_core_uses_words_of_its_call(way, vocabulary):
    """Two tokens, one directly after the other, under a schedule that lets one core run only if nothing else can.

    The second token's run-time parameters are written as soon as the first's logits are there; a late core must
    still use the first's. A vocabulary of 256 has fewer rows of blocks than there are streams.
    """
    model = untrained(transformers.LlamaConfig(**SIZES | {"num_hidden_layers": 1, "vocab_size": vocabulary}))
    call = dataclasses.replace(model.call(3, 7, model.cache(BFLOAT16)), design=DecodeLayer(model.shape, way))
    plan, buffers = plan_of(call.program()), call.buffers()
    array = emulator(plan.array)
    first = run(array, plan, **buffers)
    for core in plan.array.cores:
        for _ in range(2):
            found = run(array, plan, seed=2, settle=False, last=f"core {core.tile}", **buffers)
            assert all(found[key].tobytes() == first[key].tobytes() for key in first), core.tile


def test_generated_text_equals_float64(rng, model):
    """Token after token over the cache that the array wrote, the likeliest token each time."""
    cache, token, array = model.cache(BFLOAT16), 2, None
    for position in range(5):
        case = case_of(model.call(position, token, cache), rng)
        array = array or emulator(case.plan.array)
        found = case.check(array)
        cache, token = found["cache"].reshape(cache.shape), int(np.argmax(found["logits"]))
    assert array.leftovers() == []
