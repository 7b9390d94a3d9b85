# SPDX-License-Identifier: Apache-2.0
"""The last stages of the self-test: decoder layers, a token and a prompt of a small decoder with random weights.

The programs of the token and of the prompt are those that `flownpu build` writes for a model (aie/programs/).
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial

import numpy as np

from flownpu import _native
from flownpu.aie.designs.decode_layer.design import CalledLayer
from flownpu.aie.designs.decode_layer.shape import LayerShape, Projection
from flownpu.aie.programs.alone import program_of
from flownpu.aie.programs.call import fixed_call
from flownpu.aie.programs.decode import decode_program
from flownpu.aie.programs.decoder_shape import DecoderShape
from flownpu.aie.programs.prefill import prefill_program
from flownpu.selftest.reference.layer import (
    EPSILON,
    LayerInputs,
    expectation,
    random_call,
    random_layer,
    random_projection,
    rotary_table,
)
from flownpu.selftest.reference.numbers import BFLOAT16, bf16
from flownpu.selftest.reference.prompt import PrefillModel
from flownpu.selftest.stage import Check, Stage, Trial
from flownpu.selftest.worker import RESULT

Rng = np.random.Generator

_LAYERS = [CalledLayer(64, 0), CalledLayer(None, 1), CalledLayer(40, 0)]
_CONTEXT = 256
_MODEL = _native.Decoder(
    [
        _native.Layer(
            _native.Attention(
                heads=4, kv_heads=2, head_size=64, scale=64**-0.5, qk_norm="each head", window=layer.window or 0,
                table=layer.table,
            ),
            _native.FeedForward(size=512, activation="geglu"),
            post_norms=True,
        )
        for layer in _LAYERS
    ],
    hidden=256, vocabulary=512, positions=_CONTEXT, epsilon=EPSILON,
)  # fmt: skip
_DECODER = DecoderShape(_MODEL, _CONTEXT)
SHAPE = _DECODER.shape
_SPLIT_CONTEXT = 560  # with split keys: a multiple of the 28 tiles, so that each has the same number of positions
_POSITION, _SPLIT_POSITION = 100, 550  # at 550 every tile has some of the split keys
_INT8_CONTEXT, _INT8_POSITION = 448, 440  # likewise: an object of each tile has 32 positions
_TOKENS, _CHUNK = 50, 64  # tokens of the prompt, and of the chunk, whose rest is empty


def decoder_stages(target: str) -> Iterator[Stage]:
    """The stages; none on npu1, which the decode layer does not fit. `work` of the layers' stages: number of layers."""
    if target != "npu2":
        return
    for name, layers in (("decode_layer", 1), ("decode_layer, two layers", 2)):
        yield Stage(name, "decode_layer", partial(_layers, SHAPE, name, "pairs", layers, _CONTEXT, _POSITION), layers)
    name = "decode_layer, split keys"
    yield Stage(name, name, partial(_layers, SHAPE, name, "split", 1, _SPLIT_CONTEXT, _SPLIT_POSITION), 1)
    name, shape = "decode_layer, int8 cache", replace(SHAPE, int8_cache=True)
    yield Stage(name, name, partial(_layers, shape, name, "split", 1, _INT8_CONTEXT, _INT8_POSITION), 1)
    name, shape = "decode_layer, norms of all heads", replace(SHAPE, norm_of_all_heads=True)
    yield Stage(name, name, partial(_layers, shape, name, "pairs", 1, _CONTEXT, _POSITION), 1)
    name, shape = "decode_layer, output gate", replace(SHAPE, output_gate=True)
    yield Stage(name, name, partial(_layers, shape, name, "pairs", 1, _CONTEXT, _POSITION), 1)
    yield Stage("token", "token", _token, 1)
    yield Stage("prompt", "prompt", partial(_prompt, target), _TOKENS, 120)


def _layers(shape: LayerShape, name: str, way: str, count: int, context: int, position: int, rng: Rng) -> Trial:
    """Layers of a token, in one call; `way` is how attention is shared among tiles ("pairs", "split")."""
    call = random_call(shape, rng, position, [CalledLayer()] * count, context, way=way)
    array = f"decode_layer-{way}" + "-all" * shape.norm_of_all_heads + "-int8" * shape.int8_cache
    array += "-gate" * shape.output_gate
    fixed = fixed_call("decode_layer", array, f"layers{count}", call.program)
    inputs = {f"{fixed.name} {buffer}": content for buffer, content in call.buffers().items()}
    read, written = ("int8_rows", ["int8_rows"]) if shape.int8_cache else ("cache", [])
    program = program_of([fixed], kind=name, constants=inputs, same={"cache_bytes": read})
    outputs = tuple(f"{fixed.name} {buffer}" for buffer in ("state", "cache", *written))

    def select(name: str, found: Mapping[str, np.ndarray]) -> np.ndarray:
        by_name = {buffer.rpartition(" ")[2]: content for buffer, content in found.items()}
        in_bf16 = {buffer: by_name[buffer].view(BFLOAT16) for buffer in ("state", "cache")}
        return call.outcome(by_name | in_bf16)[name]

    checks = tuple(Check(name, partial(select, name), *numbers) for name, numbers in expectation(call, rng).items())
    return Trial(program, inputs, outputs, checks)


def _token(rng: Rng) -> Trial:
    """A token through all layers and the LM head, with a KV cache full of random numbers."""
    call = random_call(SHAPE, rng, _POSITION, _LAYERS, _CONTEXT, tables=2)
    call = replace(
        call, update=np.zeros_like(call.update), scale=SHAPE.d**-0.5, vocabulary=_MODEL.vocabulary,
        head=random_projection(rng, _MODEL.vocabulary, SHAPE.hidden),
        final_norms=bf16(rng.uniform(0.5, 1.5, (SHAPE.entry_norms, SHAPE.hidden))),
    )  # fmt: skip
    inputs = call.buffers()
    del inputs["state"]  # the host writes it before the run, as in a session
    choice = decode_program(_DECODER, "npu2", _CONTEXT, ways=[call.design.way])
    program = replace(choice.program, kind="token", attributes={})
    expected = expectation(call, rng)
    checks = (
        Check("logits", lambda found: found[RESULT], *expected["logits"]),
        *(Check(part, partial(_of_cache, call, part), *expected[part]) for part in ("position", "other positions")),
    )
    return Trial(program, inputs, ("cache",), checks, _POSITION, call.hidden.astype(np.float32))


def _of_cache(call: LayerInputs, part: str, found: Mapping[str, np.ndarray]) -> np.ndarray:
    """From the cache, the keys and values of the token's position, or those of all other positions."""
    cache = found["cache"].view(BFLOAT16).reshape(call.cache.shape)
    values = cache[:, call.position] if part == "position" else np.delete(cache, call.position, axis=1)
    return np.asarray(values.reshape(-1))


def _prompt(target: str, rng: Rng) -> Trial:
    """A prompt that does not fill its chunk; the keys and values of all layers are compared."""
    weights = [random_layer(SHAPE, rng) for _ in _LAYERS]
    rotary = np.stack([rotary_table(_CONTEXT, SHAPE.d, base) for base in (1e4, 1e6)])
    hidden = bf16(rng.normal(size=(_TOKENS, SHAPE.hidden)) * 3)
    model = PrefillModel(SHAPE, _LAYERS, weights, rotary, SHAPE.d**-0.5, rng)
    for _ in model.prefill(hidden, 0):
        pass  # the steps are not compared here: the last layer's keys and values depend on all of them
    # Zeros for weights behind the layers' that only a token's program reads: the LM head's and the final norms.
    head, norms = Projection(_MODEL.vocabulary, SHAPE.hidden).bytes, SHAPE.entry_norms * SHAPE.line
    inputs = {
        "weights": np.concatenate([*(layer.blocks() for layer in weights), np.zeros(head, np.uint8)]),
        "vectors": np.concatenate([*(layer.vectors(SHAPE) for layer in weights), np.zeros(norms, BFLOAT16)]),
        "rotary": rotary,
    }
    program = replace(prefill_program(_DECODER, target, _CONTEXT, _CHUNK), kind="prompt", attributes={})
    size = len(_LAYERS), _CONTEXT, SHAPE.kv_heads, 2, SHAPE.d
    check = Check(
        "cache", lambda found: found["cache"].view(BFLOAT16).reshape(size)[:, :_TOKENS], *model.outcome(0, _TOKENS)
    )
    return Trial(program, inputs, ("cache",), (check,), 0, hidden.astype(np.float32).reshape(-1))
