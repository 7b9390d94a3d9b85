// SPDX-License-Identifier: Apache-2.0
// com.microsoft RotaryEmbedding on the CPU: rotates heads by their tokens' positions, for exports
// that do so outside of their attention.
//
//   X float32 [B, S, H d], or [B, H, S, d]
//   position_ids int64 [B, S], or the first token's position alone, from which every row counts on:
//   [1], or a scalar
//   cos_cache, sin_cache float32 [positions, half]
//
// The first 2 half elements of a head are rotated: rotary_embedding_dim, or all where that is 0.
//
// With is_packed_batching = 1 a row holds several sequences, and position_ids each token's position
// in its own sequence; nothing else changes here.
#include <algorithm>

#include "ops/cpu/step.h"
#include "ops/error.h"

namespace flownpu::cpu {
namespace {

enum Input : std::uint8_t { kX, kPositionIds, kCosCache, kSinCache };

// A bound for half of a head's elements. It is above any real size, and twice the bound does not
// overflow.
constexpr std::int64_t kMostHalf = std::int64_t{1} << 60;

class RotaryEmbedding final : public Step {
 public:
  RotaryEmbedding(const Node& node, const Context& context)
      : context_(context),
        name_(to_string(node)),
        interleaved_(node.integer("interleaved", 0) != 0),
        rotary_size_(node.integer("rotary_embedding_dim", 0)),
        heads_(node.integer("num_heads", 0)) {
    if (rotary_size_ > 0 && heads_ <= 0)
      fail("[", name_, "] expected num_heads with rotary_embedding_dim = ", rotary_size_);
    if (rotary_size_ % 2 != 0)
      fail("[", name_, "] expected an even rotary_embedding_dim, got ", rotary_size_);
  }

  // Each slice needs a position for each of its tokens. A single position would be that of the
  // prompt's first token.
  std::optional<Slicing> slicing(const Node& node) const override {
    const Value* ids = node.input(kPositionIds);
    if (ids == nullptr || !ids->shape || ids->shape->rank() != 2) return std::nullopt;
    const Value* x = node.input(kX);
    if (!x->shape || x->shape->rank() != 3) return std::nullopt;
    return Slicing{.inputs = {kX, kPositionIds}, .outputs = {0}};
  }

  void infer(std::span<const Tensor> inputs, std::span<Shape> outputs) const override {
    const Shape& x = inputs[kX].shape;
    const Shape& table = inputs[kCosCache].shape;
    if (x.rank() != 3 && x.rank() != 4) {
      fail("[", name_, "] expected [batch, tokens, heads d] or [batch, heads, tokens, d], got ",
           to_string(x));
    }
    const std::int64_t d = head_size(inputs);
    const std::int64_t rotated = rotary_size_ > 0 ? rotary_size_ : d;
    if (table.rank() != 2 || !(inputs[kSinCache].shape == table) || rotated % 2 != 0 ||
        table[1] != rotated / 2) {
      // ONNX Runtime also accepts tables with all angles of half a head if fewer elements are
      // rotated.
      unsupported("[", name_, "] expected cos_cache and sin_cache of shape [positions, half the ",
                  "elements that are rotated, of which there are ", rotated, "], got ",
                  to_string(table), " and ", to_string(inputs[kSinCache].shape));
    }
    if (d <= 0 || x[-1] % d != 0 || rotated > d) {
      fail("[", name_, "] expected heads of at least ", rotated, " elements, as many in each, got ",
           to_string(x), " in heads of ", d);
    }
    check_positions(inputs);
    outputs[0] = x;
  }

  void run(std::span<const Tensor> inputs, std::span<const Tensor> outputs,
           std::span<std::byte> /*scratch*/) const override {
    const Shape& x = inputs[kX].shape;
    const std::int64_t d = head_size(inputs);
    const std::int64_t half = inputs[kCosCache].shape[1];
    context_.pool->run_rows(x.elements() / std::max<std::int64_t>(x[-1], 1), [&](std::int64_t row) {
      const float* from = inputs[kX].as<const float>() + row * x[-1];
      float* to = outputs[0].as<float>() + row * x[-1];
      if (from != to) std::copy_n(from, x[-1], to);
      const std::int64_t angle = position_of(inputs, row) * half;
      for (std::int64_t head = 0; head < x[-1]; head += d) {
        context_.kernels.rope(to + head, inputs[kCosCache].as<const float>() + angle,
                              inputs[kSinCache].as<const float>() + angle, half, interleaved_);
      }
    });
  }

 private:
  static std::int64_t tokens_of(const Shape& x) { return x.rank() == 4 ? x[2] : x[1]; }

  // d; 0 if X has no whole number of heads.
  std::int64_t head_size(std::span<const Tensor> inputs) const {
    const Shape& x = inputs[kX].shape;
    if (x.rank() == 4) return x[3];
    if (heads_ > 0) return x[2] % heads_ == 0 ? x[2] / heads_ : 0;
    return std::min(inputs[kCosCache].shape[1], kMostHalf) * 2;
  }

  // Position of the token that the `row`-th row of X's last axis belongs to.
  static std::int64_t position_of(std::span<const Tensor> inputs, std::int64_t row) {
    const Shape& x = inputs[kX].shape;
    const std::int64_t tokens = tokens_of(x);
    const std::int64_t token = row % tokens;
    const std::int64_t batch = row / tokens / (x.rank() == 4 ? x[1] : 1);
    const auto* ids = inputs[kPositionIds].as<const std::int64_t>();
    return counts_on(inputs) ? ids[0] + token : ids[batch * tokens + token];
  }

  // Whether position_ids holds the first token's position alone.
  static bool counts_on(std::span<const Tensor> inputs) {
    const Shape& ids = inputs[kPositionIds].shape;
    return ids.rank() == 0 || (ids.rank() == 1 && ids[0] == 1);
  }

  void check_positions(std::span<const Tensor> inputs) const {
    const Shape& x = inputs[kX].shape;
    const Shape& ids = inputs[kPositionIds].shape;
    if (!counts_on(inputs) && !(ids == Shape{x[0], tokens_of(x)})) {
      fail("[", name_, "] expected position_ids of shape [1] or [", x[0], ",", tokens_of(x),
           "], got ", to_string(ids));
    }
    if (x[0] == 0 || tokens_of(x) == 0) return;
    const std::int64_t positions = inputs[kCosCache].shape[0];
    const std::int64_t behind = counts_on(inputs) ? tokens_of(x) - 1 : 0;
    const auto* first = inputs[kPositionIds].as<const std::int64_t>();
    for (std::int64_t i = 0; i < ids.elements(); ++i) {
      if (first[i] < 0 || first[i] >= positions - behind) {
        const bool counted = first[i] >= 0 && first[i] < positions;
        fail("[", name_, "] expected positions below ", positions,
             ", which is what the model's RoPE tables hold, got ",
             counted ? first[i] + behind : first[i], ": shorten the context");
      }
    }
  }

  Context context_;
  std::string name_;
  bool interleaved_;
  std::int64_t rotary_size_;
  std::int64_t heads_;
};

constexpr Port kInputs[] = {{.name = "input", .types = kFloat},
                            {.name = "position_ids", .types = kInt64},
                            {.name = "cos_cache", .types = kFloat, .shape = "[P,H]"},
                            {.name = "sin_cache", .types = kFloat, .shape = "[P,H]"}};
constexpr Port kOutputs[] = {{.name = "output", .types = kFloat}};
constexpr AttributeRule kAttributes[] = {flag("interleaved"), count("rotary_embedding_dim", 0),
                                         count("num_heads", 0), number("scale", 1, 1),
                                         flag("is_packed_batching")};

constexpr Operator kOperators[] = {
    {{"com.microsoft", "RotaryEmbedding", 1, 1, kInputs, kOutputs, kAttributes},
     [](const Node& node, const Context& context) -> std::unique_ptr<Step> {
       return std::make_unique<RotaryEmbedding>(node, context);
     }},
};

}  // namespace

std::span<const Operator> rotary_embedding_operators() { return kOperators; }

}  // namespace flownpu::cpu
