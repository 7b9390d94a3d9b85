// SPDX-License-Identifier: Apache-2.0
// Decoder: the description of a decoder's layers. A matcher fills it from a graph
// (decoder_matcher.h), conversion from a checkpoint (python/flownpu/convert/decoder.py); devices,
// programs, predictions and reports read it. In Python it is flownpu._native.Decoder.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string_view>
#include <variant>
#include <vector>

#include "ops/error.h"
#include "ops/nodes/node.h"
#include "ops/nodes/tensor.h"
#include "ops/transformer/graph/fields.h"

namespace flownpu::transformer {

// The operator type of the node that a decoder's layers become; its domain is the device's own. Its
// attributes are the fields of Decoder, of Layer ("layer.post_norms"), and of what a layer has
// ("attention.heads", "feed_forward.size").
inline constexpr std::string_view kDecoderLayers = "DecoderLayers";

// The largest sizes that are accepted: some ten times those of the largest models there are. They
// keep the bytes of a projection below 2^26 rows / 32 x 2^20 columns / 256 x 5120 < 2^46, so that
// computing sizes cannot overflow.
inline constexpr std::int64_t kMostHeads = 1 << 12;
inline constexpr std::int64_t kMostHeadSize = 1 << 12;
inline constexpr std::int64_t kMostHidden = 1 << 20;
inline constexpr std::int64_t kMostFeedForward = 1 << 20;
inline constexpr std::int64_t kMostExperts = 1 << 12;
inline constexpr std::int64_t kMostVocabulary = 1 << 24;
inline constexpr std::int64_t kMostPositions = 1 << 30;
inline constexpr std::int64_t kMostLayers = 1 << 12;

// The activation of a gated feed-forward: y = down(act(gate x) * (up x)).
enum class Activation : std::uint8_t { kGeGlu, kSwiGlu };
inline constexpr std::array<std::string_view, 2> kActivations{"geglu", "swiglu"};
constexpr std::span<const std::string_view> texts(Activation /*of*/) { return kActivations; }

// The RMS norm of queries and keys before they are rotated.
enum class QkNorm : std::uint8_t { kNone, kEachHead, kAllHeads };
inline constexpr std::array<std::string_view, 3> kQkNorms{"none", "each head", "all heads"};
constexpr std::span<const std::string_view> texts(QkNorm /*of*/) { return kQkNorms; }

struct Attention {
  static constexpr std::string_view kName = "attention";
  // The fields that layers of one decoder may have of their own.
  static constexpr std::array<std::string_view, 4> kOwn{"window", "table", "mask",
                                                        "window_sized_cache"};

  std::int64_t heads = 0;
  std::int64_t kv_heads = 0;
  std::int64_t head_size = 0;
  float scale = 0;
  float softcap = 0;
  std::int64_t window = 0;
  std::int64_t table = 0;
  std::int64_t mask = 0;
  bool window_sized_cache = false;
  bool int8_cache = false;
  bool bidirectional_blocks = false;
  bool qkv_bias = false;
  bool output_bias = false;
  bool sinks = false;
  bool output_gate = false;
  QkNorm qk_norm = QkNorm::kNone;

  bool has_qk_norm() const { return qk_norm != QkNorm::kNone; }
  bool operator==(const Attention&) const = default;

  template <typename Visit>
  static void fields(Visit&& visit) {
    visit(field("heads", &Attention::heads, "query heads H", 1, kMostHeads));
    visit(field("kv_heads", &Attention::kv_heads, "heads of keys and values G", 1, kMostHeads));
    visit(field("head_size", &Attention::head_size, "elements of a head d", 1, kMostHeadSize));
    visit(field("scale", &Attention::scale, "factor of the scores"));
    visit(field("softcap", &Attention::softcap, "c in c tanh(score / c); 0: no cap"));
    visit(field("window", &Attention::window, "keys that a token sees, its own included; 0: all", 0,
                kMostPositions));
    visit(field("table", &Attention::table, "index of the layer's rotary table", 0, kMostLayers));
    visit(field(
        "mask", &Attention::mask,
        "1 + index of the layer's mask among the inputs, which is 0 for the keys that a token "
        "sees; 0: none",
        0, kMostLayers));
    visit(field("window_sized_cache", &Attention::window_sized_cache,
                "the cache holds the window's keys alone"));
    visit(
        field("int8_cache", &Attention::int8_cache,
              "keys and values are kept as codes of 8 bits, with a scale for each head and token"));
    visit(field("bidirectional_blocks", &Attention::bidirectional_blocks,
                "tokens of a block, such as an image's, see one another"));
    visit(field("qkv_bias", &Attention::qkv_bias, "the QKV projection has a bias"));
    visit(field("output_bias", &Attention::output_bias, "the output projection has a bias"));
    visit(field("sinks", &Attention::sinks,
                "each query head has a sink, a score without a value in its softmax"));
    visit(
        field("output_gate", &Attention::output_gate,
              "each element of its output is multiplied by the sigmoid of a row of a projection"));
    visit(field("qk_norm", &Attention::qk_norm, "norm of queries and keys"));
  }
};

// A gated delta rule (Qwen3.5): each head of values has a state [key_size, value_size]. Rows of the
// input's projections are queries and keys [key_heads, key_size] each, values and gates
// [value_heads, value_size] each; all but the gates go through a causal convolution.
struct GatedDelta {
  static constexpr std::string_view kName = "gated_delta";

  std::int64_t key_heads = 1;
  std::int64_t value_heads = 1;
  std::int64_t key_size = 1;
  std::int64_t value_size = 1;
  std::int64_t taps = 2;

  bool operator==(const GatedDelta&) const = default;
  std::int64_t values() const { return value_heads * value_size; }
  std::int64_t channels() const { return 2 * key_heads * key_size + values(); }

  template <typename Visit>
  static void fields(Visit&& visit) {
    visit(
        field("key_heads", &GatedDelta::key_heads, "heads of queries and of keys", 1, kMostHeads));
    visit(field("value_heads", &GatedDelta::value_heads,
                "heads of values, each with a state; a multiple of key_heads", 1, kMostHeads));
    visit(field("key_size", &GatedDelta::key_size, "elements of a head of queries or keys", 1,
                kMostHeadSize));
    visit(field("value_size", &GatedDelta::value_size, "elements of a head of values", 1,
                kMostHeadSize));
    visit(field("taps", &GatedDelta::taps, "tokens that the convolution reads", 2, kMostHeadSize));
  }
};

// A short convolution between two gates (LFM2): y = C * conv(B * x), where B, C and x [D] each are
// the rows of the input's projection.
struct ShortConvolution {
  static constexpr std::string_view kName = "short_convolution";

  std::int64_t taps = 2;

  bool operator==(const ShortConvolution&) const = default;

  template <typename Visit>
  static void fields(Visit&& visit) {
    visit(field("taps", &ShortConvolution::taps, "tokens that the convolution reads", 2,
                kMostHeadSize));
  }
};

// The part of a layer through which a token depends on earlier ones. All kinds but attention keep a
// state of a fixed size.
using Mixer = std::variant<Attention, GatedDelta, ShortConvolution>;

struct FeedForward {
  static constexpr std::string_view kName = "feed_forward";

  std::int64_t size = 0;
  Activation activation = Activation::kSwiGlu;
  std::int64_t experts = 0;
  std::int64_t experts_per_token = 0;
  bool normalized_experts = false;
  bool expert_vectors = false;
  float swiglu_alpha = 1;
  float swiglu_beta = 0;
  float swiglu_limit = 0;

  bool operator==(const FeedForward&) const = default;
  // Rows of the matrices that read the hidden state. No activation is left out of the cases: a new
  // one does not compile before they say whether it has a gate.
  std::int64_t gate_up_rows() const {
    switch (activation) {
      case Activation::kGeGlu:
      case Activation::kSwiGlu:
        return 2 * size;
    }
    fail("expected a known activation of a feed-forward");
  }
  // Multiply-adds of a token, for each element of its hidden state, without those of the router.
  std::int64_t multiply_adds() const {
    return (gate_up_rows() + size) * (experts > 0 ? experts_per_token : 1);
  }

  template <typename Visit>
  static void fields(Visit&& visit) {
    visit(field("size", &FeedForward::size, "rows I of the gate; with experts, of each one's", 1,
                kMostFeedForward));
    visit(field("activation", &FeedForward::activation, "activation of the gate"));
    visit(field("experts", &FeedForward::experts, "experts of the layer; 0: it is dense", 0,
                kMostExperts));
    visit(field("experts_per_token", &FeedForward::experts_per_token,
                "experts that the router chooses for a token", 0, kMostExperts));
    visit(field("normalized_experts", &FeedForward::normalized_experts,
                "the chosen experts' weights are scaled to the sum 1"));
    visit(field("expert_vectors", &FeedForward::expert_vectors,
                "experts or their router have biases, or answers have factors"));
    visit(field("swiglu_alpha", &FeedForward::swiglu_alpha,
                "a of the experts' gate sigmoid(a gate) (up + b)"));
    visit(field("swiglu_beta", &FeedForward::swiglu_beta, "b of the same"));
    visit(field("swiglu_limit", &FeedForward::swiglu_limit,
                "the largest gate of an expert, and the largest size of up; 0: none"));
  }
};

// The projections of a layer, in order: the bits of Layer::eight_bits.
enum class ProjectionKind : std::uint8_t { kQkv, kOutput, kGateUp, kDown };

struct Layer {
  static constexpr std::string_view kName = "layer";
  // The fields that layers of one decoder may have of their own.
  static constexpr std::array<std::string_view, 1> kOwn{"eight_bits"};

  Mixer mixer;
  FeedForward feed_forward;
  bool post_norms = false;
  bool norms_before = true;
  std::int64_t eight_bits = 0;

  bool operator==(const Layer&) const = default;
  bool has_eight_bits(ProjectionKind kind) const {
    return (eight_bits >> static_cast<unsigned>(kind) & 1) != 0;
  }
  bool has_attention() const { return std::holds_alternative<Attention>(mixer); }
  const Attention& attention() const { return std::get<Attention>(mixer); }
  Attention& attention() { return std::get<Attention>(mixer); }

  template <typename Visit>
  static void fields(Visit&& visit) {
    visit(field("post_norms", &Layer::post_norms,
                "the mixer's and the feed-forward's outputs are normalised before they are added"));
    visit(
        field("norms_before", &Layer::norms_before,
              "the mixer and the feed-forward read the residual stream normalised, not as it is"));
    visit(
        field("eight_bits", &Layer::eight_bits,
              "bits 0 to 3: whether the weights of QKV, of the output projection, of gate and up, "
              "and of down have 8 bits",
              0, 15));
  }
};

struct Decoder {
  static constexpr std::string_view kName = "decoder";

  std::int64_t hidden = 0;
  std::int64_t vocabulary = 0;
  std::int64_t positions = 0;
  std::int64_t rotated_size = 0;
  float epsilon = 0;
  bool all_logits = false;
  bool position_ids = false;
  bool given_tables = false;
  bool head_eight_bits = false;
  std::vector<Layer> layers;

  bool operator==(const Decoder&) const = default;

  template <typename Visit>
  static void fields(Visit&& visit) {
    visit(field("hidden", &Decoder::hidden, "elements of a hidden state D", 1, kMostHidden));
    visit(field("vocabulary", &Decoder::vocabulary, "rows of the LM head", 1, kMostVocabulary));
    visit(field("positions", &Decoder::positions, "positions of the rotary tables", 1,
                kMostPositions));
    visit(field("rotated_size", &Decoder::rotated_size,
                "first elements r of a head that RoPE turns, i with i + r/2; 0: all", 0,
                kMostHeadSize));
    visit(field("epsilon", &Decoder::epsilon, "of all RMS norms"));
    visit(field("all_logits", &Decoder::all_logits, "logits of all tokens, not only of the last"));
    visit(field("position_ids", &Decoder::position_ids,
                "the tokens' rows of rotary tables are an "
                "input; they follow one another"));
    visit(field("given_tables", &Decoder::given_tables,
                "cosines and sines of each rotary table are inputs"));
    visit(field("head_eight_bits", &Decoder::head_eight_bits,
                "the weights of the LM head have 8 bits"));
  }

  // Converts from and to the attributes of a node DecoderLayers. read() throws Error if one is
  // missing or out of range, or if layers differ in more than mixer, window, table, mask, kind of
  // cache and bits of weights.
  static Decoder read(const Node& node);
  void write(Node& node) const;

  // The attention of the layer of this number among those that have one. Without a number it is the
  // first one's, because devices need equal sizes in all layers.
  const Attention& attention(std::size_t number = 0) const;
  // How many layers have attention; the others keep states.
  std::size_t attentions() const;
  bool has_states() const { return attentions() < layers.size(); }
  // The sizes of the states of a layer without attention, for one sequence.
  std::vector<Shape> states_of(const Layer& layer) const;
  // Rows of the projections that read the hidden state, and columns of the one behind the mixer.
  std::int64_t input_rows(const Layer& layer) const;
  std::int64_t output_columns(const Layer& layer) const;
  const FeedForward& feed_forward() const { return layers.front().feed_forward; }
  bool post_norms() const { return layers.front().post_norms; }

  std::int64_t layer_count() const { return static_cast<std::int64_t>(layers.size()); }
  // The number of rotary tables.
  std::int64_t tables() const;
  // The number of masks that are inputs.
  std::size_t masks() const;
  // Whether RoPE turns a part of each head.
  bool partly_rotated() const { return rotated_size != 0; }
  // The elements of all query heads, H d.
  std::int64_t attended() const { return attention().heads * attention().head_size; }
  // The number of rows of the QKV projection, without those of output gates.
  std::int64_t packed_heads() const {
    return attended() + 2 * attention().kv_heads * attention().head_size;
  }
  // Elements of the norms of queries and of keys; 0: there are none.
  std::array<std::int64_t, 2> qk_norm_sizes() const;
  // The number of norm weights at an entry to the residual stream; without norms_before the second
  // is that of the last norm, and unused elsewhere.
  std::int64_t entry_norms() const { return post_norms() ? 2 : 1; }
  // Multiply-adds for one token, without those of attention.
  std::int64_t multiply_adds() const;
};

// Throws Error unless a node DecoderLayers has the following values, which are the same for all
// devices. The last `extra` inputs are a device's own and not checked:
//   inputs   hidden f32 [B, S, D]; total_sequence_length int32; seqlens_k int32 [B]; past key, past
//            value of each layer with attention; with blocks, bidirectional_blocks int32 [B, S] of
//            all layers; with position_ids, position_ids int64 [B, S]; the masks f32 [1 or B, 1 or
//            H, S, T]; with given_tables, cosines and sines f32 [P, r/2] of each table
//   outputs  logits f32 [B, 1, V], or [B, S, V] of all tokens; present key, present value of each
//            layer with attention; the states of the other layers, which are among the last inputs
void check_values_of_decoder(const Node& node, const Decoder& decoder, std::size_t extra = 0);

inline constexpr std::size_t kHidden = 0;
inline constexpr std::size_t kTotalTokens = 1;
inline constexpr std::size_t kTokensBeforeLast = 2;
inline constexpr std::size_t kFirstPast = 3;
inline constexpr std::size_t kLogits = 0;
inline constexpr std::size_t kFirstPresent = 1;

}  // namespace flownpu::transformer
