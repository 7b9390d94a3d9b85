# SPDX-License-Identifier: Apache-2.0
"""Shapes of decode layers for the tests: those of every model, and small ones of every kind."""

from flownpu.aie.designs.decode_layer.design import LayerShape
from flownpu.selftest.reference import layer as reference

GEMMA, QWEN = {"post_norms": True, "qk_norm": True}, {"qk_norm": True}
OLMO = {**GEMMA, "norm_of_all_heads": True, "norms_before": False}
SHAPES = {
    "gemma3-1b": LayerShape(1152, 4, 1, 256, 6912, "geglu", **GEMMA),
    "gemma3-4b": LayerShape(2560, 8, 4, 256, 10240, "geglu", **GEMMA),
    "llama3.2-1b": LayerShape(2048, 32, 8, 64, 8192, "swiglu"),
    "llama3.2-3b": LayerShape(3072, 24, 8, 128, 8192, "swiglu"),
    "llama3.1-8b": LayerShape(4096, 32, 8, 128, 14336, "swiglu"),
    "qwen3-0.6b": LayerShape(1024, 16, 8, 128, 3072, "swiglu", **QWEN),
    "qwen3-1.7b": LayerShape(2048, 16, 8, 128, 6144, "swiglu", **QWEN),
    "qwen3-4b": LayerShape(2560, 32, 8, 128, 9728, "swiglu", **QWEN),
    "qwen3-8b": LayerShape(4096, 32, 8, 128, 12288, "swiglu", **QWEN),
    "gemma3-topics": LayerShape(256, 4, 2, 64, 480, "geglu", **GEMMA),
}
# Layers of every kind, small enough for many runs: sizes that are no multiples of 256 or 128, and one to eight KV
# heads.
SMALL = {
    "gemma3, one KV head": LayerShape(384, 4, 1, 256, 800, "geglu", **GEMMA),
    "gemma3, four KV heads": LayerShape(320, 8, 4, 64, 672, "geglu", **GEMMA),
    "llama, eight KV heads": LayerShape(320, 16, 8, 64, 672, "swiglu"),
    # Scores of random layers have a deviation of about 1, so that a cap of 2 changes most of them.
    "gemma2, two KV heads": LayerShape(288, 8, 2, 64, 544, "geglu", post_norms=True, softcap=2.0),
    "olmo2, four KV heads": LayerShape(320, 8, 4, 64, 544, "swiglu", **OLMO),
    "llama, three KV heads": LayerShape(160, 6, 3, 64, 416, "swiglu"),
    # A bias in a block of its own, and one behind the columns of the last block, beside one class of streams.
    "llama with biases": LayerShape(256, 8, 4, 64, 416, "swiglu", output_bias=True),
    "llama with biases, one KV head": LayerShape(288, 5, 1, 64, 416, "swiglu", output_bias=True),
    "qwen3, eight KV heads": LayerShape(256, 16, 8, 128, 544, "swiglu", **QWEN),
    "qwen3, two KV heads, groups of six": LayerShape(288, 12, 2, 32, 544, "swiglu", **QWEN),
    # Sinks: bundles of KV heads, and one class of streams whose heads take turns.
    "gpt-oss, eight KV heads": LayerShape(320, 16, 8, 64, 544, "swiglu", output_bias=True, has_sinks=True),
    "gpt-oss, three KV heads": LayerShape(160, 12, 3, 64, 416, "swiglu", **QWEN, has_sinks=True),
    # 28 tiles share some rows beside those of the streams: of four blocks (gated ones, too) and of ten.
    "llama, shared rows": LayerShape(1024, 4, 2, 64, 2400, "swiglu"),
}
CAPACITY = 256
WINDOW = 64


def random_call(shape, rng, position, layers, capacity=CAPACITY, tables=1, way="pairs"):
    return reference.random_call(shape, rng, position, layers, capacity, tables, way)
