// SPDX-License-Identifier: Apache-2.0
// RotaryEmbedding, of com.microsoft and of ONNX, on the CPU: rotates heads by their tokens'
// positions, for exports that do so outside of their attention.
//
//   X float32 [B, S, H d], or [B, H, S, d]
//   position_ids int64 [B, S], or the first token's position alone, from which every row counts on:
//   [1], or a scalar
//   cos_cache, sin_cache float32 [positions, half]; of ONNX's without position_ids [B, S, half]
//
// The first 2 half elements of a head are rotated: rotary_embedding_dim, or all where that is 0.
//
// With is_packed_batching = 1 a row holds several sequences, and position_ids each token's position
// in its own sequence; nothing else changes here.
#include <algorithm>

#include "ops/cpu/integers.h"
#include "ops/cpu/step.h"
#include "ops/cpu/widened.h"
#include "ops/error.h"

namespace flownpu::cpu {
namespace {

constexpr std::size_t kX = 0;

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
        heads_(node.integer("num_heads", 0)),
        is_standard_(node.domain.empty()),
        ids_(is_standard_ ? 3 : 1),
        cos_(is_standard_ ? 1 : 2),
        sin_(cos_ + 1) {
    if (rotary_size_ > 0 && heads_ <= 0 && !is_standard_)
      fail("[", name_, "] expected num_heads with rotary_embedding_dim = ", rotary_size_);
    if (rotary_size_ % 2 != 0)
      fail("[", name_, "] expected an even rotary_embedding_dim, got ", rotary_size_);
  }

  // Each slice needs a position for each of its tokens. A single position would be that of the
  // prompt's first token.
  std::optional<Slicing> slicing(const Node& node) const override {
    const Value* ids = node.input(ids_);
    if (ids == nullptr || !ids->shape || ids->shape->rank() != 2) return std::nullopt;
    const Value* x = node.input(kX);
    if (!x->shape || x->shape->rank() != 3) return std::nullopt;
    return Slicing{.inputs = {kX, ids_}, .outputs = {0}};
  }

  void infer(std::span<const Tensor> inputs, std::span<Shape> outputs) const override {
    const Shape& x = inputs[kX].shape;
    const Shape& table = inputs[cos_].shape;
    if (x.rank() != 3 && x.rank() != 4) {
      fail("[", name_, "] expected [batch, tokens, heads d] or [batch, heads, tokens, d], got ",
           to_string(x));
    }
    if (is_standard_ && x.rank() == 3 && heads_ <= 0)
      fail("[", name_, "] expected num_heads with an input of 3 axes");
    const std::int64_t d = head_size(inputs);
    const std::int64_t rotated = rotary_size_ > 0 ? rotary_size_ : d;
    if (table.rank() != (has_ids(inputs) ? 2 : 3) || !(inputs[sin_].shape == table) ||
        rotated % 2 != 0 || table[-1] != rotated / 2) {
      // ONNX Runtime also accepts tables with all angles of half a head if fewer elements are
      // rotated.
      unsupported("[", name_, "] expected cos_cache and sin_cache of shape [positions, half the ",
                  "elements that are rotated, of which there are ", rotated, "], got ",
                  to_string(table), " and ", to_string(inputs[sin_].shape));
    }
    if (d <= 0 || x[-1] % d != 0 || rotated > d) {
      fail("[", name_, "] expected heads of at least ", rotated, " elements, as many in each, got ",
           to_string(x), " in heads of ", d);
    }
    if (has_ids(inputs)) {
      check_positions(inputs);
    } else if (table[0] != x[0] || table[1] != tokens_of(x)) {
      fail("[", name_, "] expected angles for ", x[0], " times ", tokens_of(x), " tokens, got ",
           to_string(table));
    }
    outputs[0] = x;
  }

  void run(std::span<const Tensor> inputs, std::span<const Tensor> outputs,
           std::span<std::byte> /*scratch*/) const override {
    const Shape& x = inputs[kX].shape;
    const std::int64_t d = head_size(inputs);
    const std::int64_t half = inputs[cos_].shape[-1];
    context_.pool->run_rows(x.elements() / std::max<std::int64_t>(x[-1], 1), [&](std::int64_t row) {
      const float* from = inputs[kX].as<const float>() + row * x[-1];
      float* to = outputs[0].as<float>() + row * x[-1];
      if (from != to) std::copy_n(from, x[-1], to);
      const std::int64_t angle = position_of(inputs, row) * half;
      for (std::int64_t head = 0; head < x[-1]; head += d) {
        context_.kernels.rope(to + head, inputs[cos_].as<const float>() + angle,
                              inputs[sin_].as<const float>() + angle, half, interleaved_);
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
    return std::min(inputs[cos_].shape[-1], kMostHalf) * 2;
  }

  // Whether a token's angles are in the tables' row that its position names, not in its own.
  bool has_ids(std::span<const Tensor> inputs) const { return is_given(inputs, ids_); }

  // The tables' row of the token that the `row`-th row of X's last axis belongs to.
  std::int64_t position_of(std::span<const Tensor> inputs, std::int64_t row) const {
    const Shape& x = inputs[kX].shape;
    const std::int64_t tokens = tokens_of(x);
    const std::int64_t token = row % tokens;
    const std::int64_t batch = row / tokens / (x.rank() == 4 ? x[1] : 1);
    if (!has_ids(inputs)) return batch * tokens + token;
    const auto* ids = inputs[ids_].as<const std::int64_t>();
    return counts_on(inputs) ? ids[0] + token : ids[batch * tokens + token];
  }

  // Whether position_ids holds the first token's position alone.
  bool counts_on(std::span<const Tensor> inputs) const {
    const Shape& ids = inputs[ids_].shape;
    return !is_standard_ && (ids.rank() == 0 || (ids.rank() == 1 && ids[0] == 1));
  }

  void check_positions(std::span<const Tensor> inputs) const {
    const Shape& x = inputs[kX].shape;
    const Shape& ids = inputs[ids_].shape;
    if (!counts_on(inputs) && !(ids == Shape{x[0], tokens_of(x)})) {
      fail("[", name_, "] expected position_ids of shape [1] or [", x[0], ",", tokens_of(x),
           "], got ", to_string(ids));
    }
    if (x[0] == 0 || tokens_of(x) == 0) return;
    const std::int64_t positions = inputs[cos_].shape[0];
    const std::int64_t behind = counts_on(inputs) ? tokens_of(x) - 1 : 0;
    const auto* first = inputs[ids_].as<const std::int64_t>();
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
  bool is_standard_;
  // The places of position_ids, cos_cache and sin_cache.
  std::size_t ids_;
  std::size_t cos_;
  std::size_t sin_;
};

constexpr Port kInputs[] = {
    {.name = "input", .types = kFloats, .type_letter = 'T'},
    {.name = "position_ids", .types = kInt64},
    {.name = "cos_cache", .types = kFloats, .shape = "[P,H]", .type_letter = 'T'},
    {.name = "sin_cache", .types = kFloats, .shape = "[P,H]", .type_letter = 'T'}};
constexpr Port kOutputs[] = {{.name = "output", .types = kFloats, .type_letter = 'T'}};
constexpr AttributeRule kAttributes[] = {flag("interleaved"), count("rotary_embedding_dim", 0),
                                         count("num_heads", 0), number("scale", 1, 1),
                                         flag("is_packed_batching")};

constexpr Port kStandardInputs[] = {
    {.name = "X", .types = kFloats, .type_letter = 'T'},
    {.name = "cos_cache", .types = kFloats, .shape = "[..,H]", .type_letter = 'T'},
    {.name = "sin_cache", .types = kFloats, .shape = "[..,H]", .type_letter = 'T'},
    optional({.name = "position_ids", .types = kInt64})};
constexpr Port kStandardOutputs[] = {{.name = "Y", .types = kFloats, .type_letter = 'T'}};
constexpr AttributeRule kStandardAttributes[] = {
    flag("interleaved"), count("rotary_embedding_dim", 0), count("num_heads", 0)};

constexpr Operator kOperators[] = {
    {{"", "RotaryEmbedding", 23, 23, kStandardInputs, kStandardOutputs, kStandardAttributes},
     widened<make<RotaryEmbedding>>},
    {{"com.microsoft", "RotaryEmbedding", 1, 1, kInputs, kOutputs, kAttributes},
     widened<make<RotaryEmbedding>>},
};

}  // namespace

std::span<const Operator> rotary_embedding_operators() { return kOperators; }

}  // namespace flownpu::cpu
