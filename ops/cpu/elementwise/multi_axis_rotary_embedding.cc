// SPDX-License-Identifier: Apache-2.0
// MRotaryEmbedding of com.microsoft on the CPU: rotates heads by angles of three positions, in time
// and on the height and width of an image (Wang et al., 2024, arXiv 2409.12191, section 2.1). The
// tokens of a text have three equal ones.
//
//   input f32 [B, S, H d] or [B, H, S, d], position_ids int64 [3, B, S]
//   cos_cache, sin_cache f32 [positions, half]
//
// mrope_section = [t, h, w] says how many of the `half` angles each position gives: with
// mrope_layout = 0 the first t, the next h, the last w; with 1 every third, from 1 on h and from 2
// on w of them, and all others are of t.
#include <algorithm>
#include <vector>

#include "ops/cpu/integers.h"
#include "ops/cpu/step.h"
#include "ops/cpu/widened.h"
#include "ops/error.h"

namespace flownpu::cpu {
namespace {

class MultiAxisRotaryEmbedding final : public Step {
 public:
  MultiAxisRotaryEmbedding(const Node& node, const Context& context)
      : context_(context),
        name_(to_string(node)),
        interleaved_(node.integer("interleaved", 0) != 0),
        rotary_size_(node.integer("rotary_embedding_dim", 0)),
        heads_(node.integer("num_heads", 0)) {
    const std::vector<std::int64_t> section = node.integers("mrope_section");
    if (section.size() != 3)
      fail("[", name_, "] expected three numbers in mrope_section, got ", section.size());
    const bool in_turn = node.integer("mrope_layout", 0) == 1;
    const std::int64_t half = section[0] + section[1] + section[2];
    for (std::int64_t angle = 0; angle < half; ++angle) {
      const std::int64_t third = angle % 3;
      if (in_turn) {
        const bool other = third > 0 && angle < 3 * section[static_cast<std::size_t>(third)];
        axes_.push_back(other ? third : 0);
      } else {
        axes_.push_back(angle < section[0] ? 0 : angle < section[0] + section[1] ? 1 : 2);
      }
    }
  }

  void infer(std::span<const Tensor> inputs, std::span<Shape> outputs) const override {
    const Shape& x = inputs[0].shape;
    if (x.rank() != 3 && x.rank() != 4)
      fail("[", name_, "] expected [batch, tokens, heads d] or [batch, heads, tokens, d], got ",
           to_string(x));
    const std::int64_t half = inputs[2].shape[1];
    const std::int64_t d = head_size(inputs);
    const auto angles = static_cast<std::int64_t>(axes_.size());
    if (half != angles || (rotary_size_ > 0 ? rotary_size_ : d) != 2 * half)
      unsupported("[", name_, "] expected tables of the ", angles, " angles of mrope_section, got ",
                  half, " for ", rotary_size_ > 0 ? rotary_size_ : d, " elements");
    if (d < 2 * half || x[-1] % d != 0)
      fail("[", name_, "] expected heads of at least ", 2 * half, " elements, got ", to_string(x),
           " in heads of ", d);
    const Shape positions{3, x[0], tokens_of(x)};
    if (!(inputs[1].shape == positions))
      fail("[", name_, "] expected position_ids of shape ", to_string(positions), ", got ",
           to_string(inputs[1].shape));
    for (std::int64_t i = 0; i < positions.elements(); ++i) {
      const std::int64_t position = inputs[1].as<const std::int64_t>()[i];
      if (position < 0 || position >= inputs[2].shape[0])
        fail("[", name_, "] expected positions below ", inputs[2].shape[0],
             ", which is what the model's RoPE tables hold, got ", position,
             ": shorten the context");
    }
    outputs[0] = x;
  }

  // The cosines and sines of a token, for each thread.
  std::size_t scratch_bytes(std::span<const Tensor> /*inputs*/) const override {
    return static_cast<std::size_t>(context_.pool->threads()) * bytes();
  }

  void run(std::span<const Tensor> inputs, std::span<const Tensor> outputs,
           std::span<std::byte> scratch) const override {
    const Shape& x = inputs[0].shape;
    const std::int64_t tokens = x[0] * tokens_of(x);
    context_.pool->run(tokens, [&](std::int64_t token, std::size_t thread) {
      Scratch parts(scratch.data() + thread * bytes());
      rotate(inputs, token, parts, outputs[0].as<float>());
    });
  }

 private:
  static std::int64_t tokens_of(const Shape& x) { return x.rank() == 4 ? x[2] : x[1]; }

  std::int64_t head_size(std::span<const Tensor> inputs) const {
    const Shape& x = inputs[0].shape;
    if (x.rank() == 4) return x[3];
    return heads_ > 0 && x[2] % heads_ == 0 ? x[2] / heads_ : 2 * inputs[2].shape[1];
  }

  std::size_t bytes() const {
    Scratch parts;
    parts.take<float>(static_cast<std::int64_t>(axes_.size()));
    parts.take<float>(static_cast<std::int64_t>(axes_.size()));
    return parts.bytes();
  }

  // All heads of the `token`-th token of the batch.
  void rotate(std::span<const Tensor> inputs, std::int64_t token, Scratch& parts, float* y) const {
    const Shape& x = inputs[0].shape;
    const auto half = static_cast<std::int64_t>(axes_.size());
    auto* cos = parts.take<float>(half);
    auto* sin = parts.take<float>(half);
    const std::int64_t tokens = tokens_of(x);
    for (std::int64_t angle = 0; angle < half; ++angle) {
      const std::int64_t axis = axes_[static_cast<std::size_t>(angle)];
      const std::int64_t position =
          inputs[1].as<const std::int64_t>()[axis * x[0] * tokens + token];
      cos[angle] = inputs[2].as<const float>()[position * half + angle];
      sin[angle] = inputs[3].as<const float>()[position * half + angle];
    }
    const std::int64_t d = head_size(inputs);
    const bool by_head = x.rank() == 4;
    const std::int64_t heads = by_head ? x[1] : x[2] / d;
    for (std::int64_t head = 0; head < heads; ++head) {
      const std::int64_t batch = token / tokens;
      const std::int64_t at = by_head ? ((batch * heads + head) * tokens + token % tokens) * d
                                      : (token * heads + head) * d;
      if (inputs[0].as<const float>() != y)
        std::copy_n(inputs[0].as<const float>() + at, d, y + at);
      context_.kernels.rope(y + at, cos, sin, half, interleaved_);
    }
  }

  Context context_;
  std::string name_;
  bool interleaved_;
  std::int64_t rotary_size_;
  std::int64_t heads_;
  // The position that each angle is of.
  std::vector<std::int64_t> axes_;
};

constexpr Port kInputs[] = {
    {.name = "input", .types = kFloats, .type_letter = 'T'},
    {.name = "position_ids", .types = kInt64, .shape = "[3,B,S]"},
    {.name = "cos_cache", .types = kFloats, .shape = "[P,H]", .type_letter = 'T'},
    {.name = "sin_cache", .types = kFloats, .shape = "[P,H]", .type_letter = 'T'}};
constexpr Port kOutputs[] = {{.name = "output", .types = kFloats, .type_letter = 'T'}};
constexpr AttributeRule kAttributes[] = {required(integers("mrope_section", 0, 1 << 16)),
                                         flag("interleaved"),
                                         count("rotary_embedding_dim", 0),
                                         count("num_heads", 0),
                                         flag("mrope_layout"),
                                         number("scale", 1, 1),
                                         flag("is_packed_batching")};

constexpr Operator kOperators[] = {
    {{"com.microsoft", "MRotaryEmbedding", 1, 1, kInputs, kOutputs, kAttributes},
     widened<make<MultiAxisRotaryEmbedding>>}};

}  // namespace

std::span<const Operator> multi_axis_rotary_embedding_operators() { return kOperators; }

}  // namespace flownpu::cpu
