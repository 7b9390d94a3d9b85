# SPDX-License-Identifier: Apache-2.0
"""Decoders for the tests of programs, from the parameters of the array that computes a layer."""

from flownpu import _native
from flownpu.aie.programs.decoder_shape import DecoderShape


def decoder_of(shape, windows, vocabulary, positions, tables=None, scale=None, eight_bits=None):
    """Layers of these sizes, with these windows (0: none), rotary tables (by default all with one) and bits."""
    layers = [
        _native.Layer(
            _native.Attention(
                heads=shape.heads, kv_heads=shape.kv_heads, head_size=shape.d, scale=scale or shape.d**-0.5,
                qk_norm="all heads" if shape.norm_of_all_heads else "each head" if shape.qk_norm else "none",
                qkv_bias=shape.qkv_bias, softcap=shape.softcap, sinks=shape.has_sinks,
                output_bias=shape.output_bias, int8_cache=shape.int8_cache,
                window=window, table=table,
            ),
            _native.FeedForward(
                size=shape.feed_forward, activation=shape.activation, experts=16 * shape.experts,
                experts_per_token=shape.experts,
            ),
            shape.post_norms,
            shape.norms_before,
            which,
        )
        for window, table, which in zip(
            windows, tables or [0] * len(windows), eight_bits or [0] * len(windows), strict=True
        )
    ]  # fmt: skip
    model = _native.Decoder(layers, hidden=shape.hidden, vocabulary=vocabulary, positions=positions, epsilon=1e-6)
    return DecoderShape(model, positions)
