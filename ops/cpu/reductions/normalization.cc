// SPDX-License-Identifier: Apache-2.0
// Norms over the last axes: LayerNormalization; the RMS norms SimplifiedLayerNormalization and
// RMSNormalization (one operator under two names); both behind a sum with a residual, which is an
// output as well; Softmax and LogSoftmax over any axis.
#include <algorithm>
#include <array>
#include <cmath>
#include <iterator>
#include <vector>

#include "ops/cpu/integers.h"
#include "ops/cpu/plane.h"
#include "ops/cpu/rows.h"
#include "ops/cpu/step.h"
#include "ops/cpu/widened.h"
#include "ops/error.h"

namespace flownpu::cpu {
namespace {

// Throws Unsupported unless the weight has x's axes from `axis` on, and axes of size 1 before them.
// ONNX's weights may be of any shape that broadcasts.
void check_weight(const std::string& name, const Shape& x, std::int64_t axis, const Shape& weight) {
  const auto axes = static_cast<int>(x.rank() - axis);
  bool fits = weight.rank() >= axes && weight.rank() <= x.rank();
  for (int i = 1; fits && i <= weight.rank(); ++i) fits = weight[-i] == (i <= axes ? x[-i] : 1);
  const Shape expected(x.begin() + axis, static_cast<std::size_t>(axes));
  if (!fits)
    unsupported("[", name, "] expected a weight of shape ", to_string(expected), ", got ",
                to_string(weight));
}

// The norm of squares, or a layer's, which has a second weight, beta. With `skips_` it is that of
// input + skip (+ bias).
class Norm final : public Step {
 public:
  Norm(const Node& node, const Context& context)
      : context_(context),
        name_(to_string(node)),
        epsilon_(node.number("epsilon", 1e-5F)),
        axis_(node.integer("axis", -1)),
        skips_(node.op_type.starts_with("Skip")),
        is_of_squares_(node.op_type.ends_with("SimplifiedLayerNormalization") ||
                       node.op_type == "RMSNormalization"),
        gamma_(skips_ ? 2 : 1),
        bias_(gamma_ + (is_of_squares_ ? 1 : 2)) {
    const auto are_known = [](const std::int64_t* begin, const std::int64_t* end) {
      return std::all_of(begin, end, [](std::int64_t size) { return size >= 0; });
    };
    const Value* x = node.input(0);
    if (!x->shape) return;
    const std::int64_t axis = wrap(name_, axis_, x->shape->rank());
    if (!are_known(x->shape->begin() + axis, x->shape->end())) return;
    for (std::size_t input = gamma_; input < node.inputs.size(); ++input) {
      const Value* weight = node.input(input);
      if (weight != nullptr && weight->shape &&
          are_known(weight->shape->begin(), weight->shape->end()))
        check_weight(name_, *x->shape, axis, *weight->shape);
    }
  }

  std::optional<Slicing> slicing(const Node& node) const override {
    const Value* x = node.input(0);
    if (!x->shape) return std::nullopt;
    const int axes = x->shape->rank() - static_cast<int>(wrap(name_, axis_, x->shape->rank()));
    return slice_rows(node, skips_ ? std::vector<std::size_t>{0, 1} : std::vector<std::size_t>{0},
                      axes);
  }

  void infer(std::span<const Tensor> inputs, std::span<Shape> outputs) const override {
    const Shape& x = inputs[0].shape;
    for (std::size_t weight = gamma_; weight <= bias_; ++weight) {
      if (is_given(inputs, weight))
        check_weight(name_, x, wrap(name_, axis_, x.rank()), inputs[weight].shape);
    }
    if (skips_ && !(x == inputs[1].shape) && !repeats(x, inputs[1].shape)) {
      unsupported("[", name_, "] expected input and skip of one shape, or a skip for each row of ",
                  "the batch, got ", to_string(x), " and ", to_string(inputs[1].shape));
    }
    for (Shape& output : outputs) output = x;
  }

  void run(std::span<const Tensor> inputs, std::span<const Tensor> outputs,
           std::span<std::byte> /*scratch*/) const override {
    const Rows rows(name_, inputs[0].shape, axis_);
    const std::int64_t n = rows.size;
    const auto given = [&](std::size_t input) {
      return is_given(inputs, input) ? inputs[input].as<const float>() : nullptr;
    };
    const float* gamma = given(gamma_);
    const float* beta = is_of_squares_ ? nullptr : given(gamma_ + 1);
    const float* bias = skips_ ? given(bias_) : nullptr;
    const std::int64_t skips = skips_ && n > 0 ? inputs[1].shape.elements() / n : 1;
    auto* normed = outputs[0].as<float>();
    // A sum without a user is kept in the norm's output, which overwrites it.
    auto* sums = outputs.size() > 3 && outputs[3].data != nullptr ? outputs[3].as<float>() : normed;
    context_.pool->run_rows(rows.count, [&](std::int64_t row) {
      const std::int64_t at = row * n;
      const float* x = given(0) + at;
      if (skips_) {
        context_.kernels.add(x, given(1) + row % skips * n, sums + at, n);
        if (bias != nullptr) context_.kernels.add(sums + at, bias, sums + at, n);
        x = sums + at;
      }
      if (is_of_squares_) {
        context_.kernels.rms_norm(x, gamma, epsilon_, normed + at, n);
      } else {
        context_.kernels.layer_norm(x, gamma, beta, epsilon_, normed + at, n);
      }
    });
  }

 private:
  // Whether `skip`, [S,D] or [1,S,D], is the same for all rows of the batch of x, [B,S,D].
  static bool repeats(const Shape& x, const Shape& skip) {
    const bool ranks = x.rank() == 3 && (skip.rank() == 2 || (skip.rank() == 3 && skip[0] == 1));
    return ranks && skip[-1] == x[-1] && skip[-2] == x[-2];
  }

  Context context_;
  std::string name_;
  float epsilon_;
  std::int64_t axis_;
  bool skips_;
  bool is_of_squares_;
  // The inputs after x and skip: gamma, of a layer's norm beta, and behind a sum bias.
  std::size_t gamma_;
  std::size_t bias_;
};

class Softmax final : public Step {
 public:
  // Before version 13 the axes from `axis` on were taken as one, and 1 was its default.
  Softmax(const Node& node, const Context& context)
      : context_(context),
        name_(to_string(node)),
        is_log_(node.op_type == "LogSoftmax"),
        is_flat_(node.since_version < 13),
        axis_(node.integer("axis", is_flat_ ? 1 : -1)) {}

  std::optional<Slicing> slicing(const Node& node) const override {
    const Value* x = node.input(0);
    if (!x->shape || wrap(name_, axis_, x->shape->rank()) != x->shape->rank() - 1)
      return std::nullopt;
    return slice_rows(node, {0}, 1);
  }

  void infer(std::span<const Tensor> inputs, std::span<Shape> outputs) const override {
    wrap(name_, axis_, inputs[0].shape.rank());
    outputs[0] = inputs[0].shape;
  }

  // Lines that are not the last axis are gathered, so that each lies in one piece.
  std::size_t scratch_bytes(std::span<const Tensor> inputs) const override {
    return after(inputs[0].shape) == 1 ? 0 : inputs[0].bytes();
  }

  void run(std::span<const Tensor> inputs, std::span<const Tensor> outputs,
           std::span<std::byte> scratch) const override {
    if (inputs[0].shape.elements() == 0) return;
    const Rows rows(name_, inputs[0].shape, axis_);
    const std::int64_t after = this->after(inputs[0].shape);
    const std::int64_t n = rows.size / after;
    const auto* x = inputs[0].as<const float>();
    auto* y = outputs[0].as<float>();
    if (after == 1) {
      context_.pool->run_rows(rows.count,
                              [&](std::int64_t row) { line(x + row * n, y + row * n, n); });
      return;
    }
    auto* gathered = reinterpret_cast<float*>(scratch.data());
    const std::int64_t blocks = (after + kTile - 1) / kTile;
    context_.pool->run(rows.count * blocks, [&](std::int64_t task) {
      const std::int64_t first = task % blocks * kTile;
      const std::int64_t lines = std::min(kTile, after - first);
      const std::int64_t at = task / blocks * rows.size;
      float* block = gathered + at + first * n;
      transpose(x + at + first, after, block, n, lines, n);
      for (std::int64_t i = 0; i < lines; ++i) line(block + i * n, block + i * n, n);
      transpose(block, n, y + at + first, after, n, lines);
    });
  }

 private:
  // The distance of a line's elements.
  std::int64_t after(const Shape& x) const {
    return is_flat_ ? 1 : elements_of(x, wrap(name_, axis_, x.rank()) + 1, x.rank());
  }

  void line(const float* x, float* y, std::int64_t n) const {
    if (!is_log_) return context_.kernels.softmax(x, y, n);
    // x - largest - ln sum e^(x - largest)
    const float largest = context_.kernels.largest(x, n);
    std::transform(x, x + n, y, [largest](float v) { return v - largest; });
    std::array<float, 1024> powers;
    double sum = 0;
    for (std::int64_t i = 0; i < n; i += std::ssize(powers)) {
      const std::int64_t count = std::min<std::int64_t>(std::ssize(powers), n - i);
      context_.kernels.apply(Function::kExp, y + i, powers.data(), count);
      sum += context_.kernels.sum(powers.data(), count);
    }
    // In float: the C library of older systems lacks the logarithm in double.
    const float logarithm = std::log(static_cast<float>(sum));
    std::transform(y, y + n, y, [logarithm](float v) { return v - logarithm; });
  }

  Context context_;
  std::string name_;
  bool is_log_;
  bool is_flat_;
  std::int64_t axis_;
};

constexpr Port kLayerNorm[] = {
    {.name = "X", .types = kFloats, .shape = "[..,D]", .type_letter = 'T'},
    {.name = "Scale", .types = kFloats, .type_letter = 'T'},
    optional({.name = "B", .types = kFloats, .type_letter = 'T'})};
constexpr Port kRmsNorm[] = {{.name = "X", .types = kFloats, .shape = "[..,D]"},
                             {.name = "scale", .types = kFloats, .type_letter = 'T'}};
constexpr Port kSkipRmsNorm[] = {
    {.name = "input", .types = kFloats, .shape = "[..,D]", .type_letter = 'T'},
    {.name = "skip", .types = kFloats, .shape = "[..,D]", .type_letter = 'T'},
    {.name = "gamma", .types = kFloats, .type_letter = 'T'},
    {.name = "bias", .types = kFloats, .presence = Presence::kOptional, .type_letter = 'T'}};
constexpr Port kSkipLayerNorm[] = {
    {.name = "input", .types = kFloats, .shape = "[..,D]", .type_letter = 'T'},
    {.name = "skip", .types = kFloats, .shape = "[..,D]", .type_letter = 'T'},
    {.name = "gamma", .types = kFloats, .type_letter = 'T'},
    {.name = "beta", .types = kFloats, .presence = Presence::kOptional, .type_letter = 'T'},
    {.name = "bias", .types = kFloats, .presence = Presence::kOptional, .type_letter = 'T'}};
constexpr Port kSoftmax[] = {{.name = "input", .types = kFloats, .type_letter = 'T'}};
constexpr Port kY[] = {{.name = "Y", .types = kFloats, .type_letter = 'T'}};
constexpr Port kSkipOutputs[] = {
    {.name = "output", .types = kFloats, .type_letter = 'T'},
    optional({.name = "mean", .types = kNone}),
    optional({.name = "inv_std_var", .types = kNone}),
    optional({.name = "input_skip_bias_sum", .types = kFloats, .type_letter = 'T'})};
// stash_type, the type in which a norm is summed, can only be float.
constexpr AttributeRule kNorm[] = {axis("axis"), number("epsilon"), only("stash_type", 1)};
constexpr AttributeRule kSkipNorm[] = {number("epsilon")};
constexpr AttributeRule kAxis[] = {axis("axis")};

constexpr Operator kOperators[] = {
    {{"", "LayerNormalization", 1, 17, kLayerNorm, kY, kNorm}, widened<make<Norm>>},
    {{"", "Softmax", 1, 13, kSoftmax, kY, kAxis}, widened<make<Softmax>>},
    {{"", "LogSoftmax", 1, 13, kSoftmax, kY, kAxis}, widened<make<Softmax>>},
    {{"", "SimplifiedLayerNormalization", 1, 1, kRmsNorm, kY, kNorm}, widened<make<Norm>>},
    {{"", "RMSNormalization", 23, 23, kRmsNorm, kY, kNorm}, widened<make<Norm>>},
    {{"com.microsoft", "SkipSimplifiedLayerNormalization", 1, 1, kSkipRmsNorm, kSkipOutputs,
      kSkipNorm},
     widened<make<Norm>>},
    {{"com.microsoft", "SkipLayerNormalization", 1, 1, kSkipLayerNorm, kSkipOutputs, kSkipNorm},
     widened<make<Norm>>},
};

}  // namespace

std::span<const Operator> normalization_operators() { return kOperators; }

}  // namespace flownpu::cpu
