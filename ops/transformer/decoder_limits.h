// SPDX-License-Identifier: Apache-2.0
// DecoderLimits: what a device computes of decoders; and the judgement of layers by it.
#pragma once

#include <cstdint>
#include <string>

#include "ops/nodes/node.h"
#include "ops/transformer/decoder.h"

namespace flownpu::transformer {

// The kinds of layers that a device computes, and how messages refer to the device. A layer of
// another kind is left to the device's host, with the reason.
struct DecoderLimits {
  std::string who;    // "the array"
  std::string means;  // what computes on it: "the array's designs"
  bool softcap = false;
  bool sinks = false;
  bool batches = false;  // several sequences at once
  bool int8_caches = false;
  bool without_rope = false;  // layers without RoPE, among layers with it
  // Norms of queries and keys over all heads, and parts that read the stream without a norm
  // (OLMo 2).
  bool norms_after = false;
  bool biases = false;   // of the QKV projection and of the output projection
  bool experts = false;  // mixtures of experts
  // Those whose experts or router have vectors beside their matrices, or another SwiGLU (gpt-oss).
  bool special_experts = false;
  // Layers that keep a state (a gated delta rule, a short convolution) in the place of a KV cache,
  // and gates of attention's output.
  bool states = false;
  bool all_logits = false;    // logits of all tokens, not only of the last
  bool position_ids = false;  // positions as an input, which chooses rows of rotary tables
  // Inputs that a run checks to hide nothing but later keys, and those before a layer's window.
  bool attention_bias = false;
  bool scaled_updates = false;    // what a layer adds to the residual stream, times a number
  bool partial_rotation = false;  // RoPE that turns the first elements of each head
  bool given_tables = false;      // rotary tables as inputs, which may change between runs
  // The hidden size and the head size must be multiples of it.
  std::int64_t multiple = 1;
};

// Why the device does not compute such a mixer, or such a feed-forward; empty if it does.
std::string unsupported(const Attention& attention, const DecoderLimits& limits);
std::string unsupported(const FeedForward& feed_forward, const DecoderLimits& limits);
// The same for a node of attention: for what its description, an Attention, does not hold.
std::string unsupported(const Node& attention, const DecoderLimits& limits);

// Throws Error unless so many rows, named `name` in the message, are a multiple of the device's.
// The vocabulary need not be one: it is padded with rows of zeros, whose logits nobody reads.
void check_multiple(const Node& node, const char* name, std::int64_t rows,
                    const DecoderLimits& limits);

}  // namespace flownpu::transformer
