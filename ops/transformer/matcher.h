// SPDX-License-Identifier: Apache-2.0
// The class behind find_decoder (decoder_matcher.h). Its functions are in decoder_matcher.cc, those
// about attention in attention_matcher.cc.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "ops/error.h"
#include "ops/transformer/decoder_matcher.h"

namespace flownpu::transformer {

inline void refuse_unless_empty(const Node& node, const std::string& reason) {
  if (!reason.empty()) fail(to_string(node), ": ", reason);
}

// An entry to the residual stream: the output of attention or feed-forward is added (in a model
// with post-norms it is normalised first), and the sum is normalised for the next projection, or
// read as it is.
struct Entry {
  const Node* norm = nullptr;
  std::string_view sum;         // the residual stream
  std::string_view normalised;  // what the next projection reads
  std::vector<const float*> weights;
};

class Matcher : public FoundDecoder {
 public:
  Matcher(const GraphWalk& graph, const DecoderLimits& limits) : graph_(graph), limits_(limits) {}

  // Throws Error that names the node in the way.
  // `first`: the first node that is an attention or a convolution with a state.
  void match(const Node& first);

 private:
  Entry first_entry(const Node& first);
  const Node* first_projection(const Node& attention) const;
  const Node& reader(std::string_view x, std::string_view what) const;
  const Node* norm_of_all_heads(const Node& attention, std::size_t input) const;
  const Node& attention_of(const Node& qkv);
  void read_norms_of_all_heads(const Node& attention, LayerConstants& layer);
  Entry layer(const Entry& entry);
  Entry finish_layer(const Entry& entry, LayerConstants layer, std::string_view mixed);
  // The output of a layer's attention, before the output projection.
  std::string_view attended(std::string_view x, LayerConstants& layer);
  void attend(const Node& attention, LayerConstants& layer);
  const Node& feed_forward(std::string_view x, LayerConstants& layer);
  // --- Layers that keep a state (state_matcher.cc)
  // The convolution with a state behind one of the projections of `x`; null: there is none.
  const Node* convolution_of(std::string_view x) const;
  const Node* projection_before(const Node& convolution) const;
  std::string_view mixed(std::string_view x, const Node& convolution, LayerConstants& layer);
  std::string_view gated_delta(std::string_view x, const Node& convolution, LayerConstants& layer);
  std::string_view short_convolution(const Node& convolution, LayerConstants& layer);
  std::int64_t read_convolution(const Node& convolution, std::string_view activation,
                                StateValues& values);
  void read_gates(std::string_view x, const Node& delta, const GatedDelta& read,
                  StateValues& values);
  void check_unit_length(const Node& delta, std::size_t input, const Value& part,
                         std::int64_t size);
  const Node& masked(const Value& rate);
  void take_gates(const Node& gate, LayerConstants& layer);
  const Node& projection_beside(std::string_view x, const Node& gate);

  Attention read_attention(const Node& node);
  void check_attention(const Node& attention) const;
  Entry next_entry(const Entry& entry, std::string_view update);
  const Node* post_norm(std::string_view update);
  float update_factor(std::string_view& update);
  std::string_view reshaped(std::string_view value);
  void finish(const Entry& entry);

  void take(const Node& node);
  const Node& projection(std::string_view x, const char* what, bool biased = false);
  const float* bias_of(const Node& projection, const char* what, bool& has);
  void check_product(const Node& node, std::int64_t rows, std::int64_t columns,
                     bool gated = false) const;
  void check_epsilon(const Node& node, float epsilon);
  // The index of the rotary table that an attention uses; layers without RoPE share an empty one.
  std::int64_t table_of(const Node& attention);
  void check_table(const Node& attention, const Value* table);
  std::int64_t mask_of(const Node& attention);

  const GraphWalk& graph_;
  const DecoderLimits& limits_;
  std::optional<bool> post_norms_;  // unknown before the first projection's output
  bool norms_before_ = true;
  // The first attention with RoPE: all others have its position_ids.
  const Node* first_rotary_ = nullptr;
};

}  // namespace flownpu::transformer
