// SPDX-License-Identifier: Apache-2.0
// Norms over the last axis: LayerNormalization; the RMS norms SimplifiedLayerNormalization and
// RMSNormalization (one operator under two names); both behind a sum with a residual, which is an
// output as well; Softmax and LogSoftmax.
#include <algorithm>
#include <cmath>

#include "ops/cpu/integers.h"
#include "ops/cpu/step.h"
#include "ops/error.h"

namespace flownpu::cpu {
namespace {

void check_axis(const Node& node, std::int64_t otherwise = -1) {
  const Value* x = node.input(0);
  const std::int64_t axis = node.integer("axis", otherwise);
  if (axis != -1 && !(x->shape && axis == x->shape->rank() - 1)) {
    fail("[", to_string(node), "] expected a norm over the last axis, got axis ", axis);
  }
}

// Throws Unsupported unless the weight has one element for each of x's last axis, and axes of size
// 1 before it. ONNX's weights may be of any shape that broadcasts.
void check_weight(const std::string& name, const Shape& x, const Shape& weight) {
  if (weight.rank() > 0 && weight[-1] == x[-1] && weight.elements() == x[-1] &&
      weight.rank() <= x.rank()) {
    return;
  }
  unsupported("[", name, "] expected a weight of shape [", x[-1], "], got ", to_string(weight));
}

// Checks the known shape of a weight when the node is prepared.
void check_weight(const Node& node, std::size_t input) {
  const Value* x = node.input(0);
  const Value* weight = node.input(input);
  const auto known = [](const Shape& shape) {
    return std::none_of(shape.begin(), shape.end(), [](std::int64_t dim) { return dim < 0; });
  };
  if (weight == nullptr || !x->shape || !weight->shape || (*x->shape)[-1] < 0 ||
      !known(*weight->shape)) {
    return;
  }
  check_weight(to_string(node), *x->shape, *weight->shape);
}

class RmsNorm final : public Step {
 public:
  RmsNorm(const Node& node, const Context& context)
      : context_(context), name_(to_string(node)), epsilon_(node.number("epsilon", 1e-5F)) {
    check_axis(node);
    check_weight(node, 1);
  }

  std::optional<Slicing> slicing(const Node& node) const override {
    return slice_rows(node, {0}, 1);
  }

  void infer(std::span<const Tensor> inputs, std::span<Shape> outputs) const override {
    check_weight(name_, inputs[0].shape, inputs[1].shape);
    outputs[0] = inputs[0].shape;
  }

  void run(std::span<const Tensor> inputs, std::span<const Tensor> outputs,
           std::span<std::byte> /*scratch*/) const override {
    const std::int64_t n = inputs[0].shape[-1];
    const std::int64_t rows = n == 0 ? 0 : inputs[0].shape.elements() / n;
    context_.pool->run_rows(rows, [&](std::int64_t row) {
      context_.kernels.rms_norm(inputs[0].as<const float>() + row * n, inputs[1].as<const float>(),
                                epsilon_, outputs[0].as<float>() + row * n, n);
    });
  }

 private:
  Context context_;
  std::string name_;
  float epsilon_;
};

class LayerNorm final : public Step {
 public:
  LayerNorm(const Node& node, const Context& context)
      : context_(context), name_(to_string(node)), epsilon_(node.number("epsilon", 1e-5F)) {
    check_axis(node);
    check_weight(node, 1);
    check_weight(node, 2);
  }

  std::optional<Slicing> slicing(const Node& node) const override {
    return slice_rows(node, {0}, 1);
  }

  void infer(std::span<const Tensor> inputs, std::span<Shape> outputs) const override {
    check_weight(name_, inputs[0].shape, inputs[1].shape);
    if (inputs.size() > 2 && inputs[2].present())
      check_weight(name_, inputs[0].shape, inputs[2].shape);
    outputs[0] = inputs[0].shape;
  }

  void run(std::span<const Tensor> inputs, std::span<const Tensor> outputs,
           std::span<std::byte> /*scratch*/) const override {
    const std::int64_t n = inputs[0].shape[-1];
    const std::int64_t rows = n == 0 ? 0 : inputs[0].shape.elements() / n;
    const float* bias = inputs.size() > 2 ? inputs[2].as<const float>() : nullptr;
    context_.pool->run_rows(rows, [&](std::int64_t row) {
      context_.kernels.layer_norm(inputs[0].as<const float>() + row * n,
                                  inputs[1].as<const float>(), bias, epsilon_,
                                  outputs[0].as<float>() + row * n, n);
    });
  }

 private:
  Context context_;
  std::string name_;
  float epsilon_;
};

class Softmax final : public Step {
 public:
  // Before version 13 the axes from `axis` on were taken as one, and 1 was its default.
  Softmax(const Node& node, const Context& context)
      : context_(context), is_log_(node.op_type == "LogSoftmax") {
    check_axis(node, node.since_version < 13 ? 1 : -1);
  }

  std::optional<Slicing> slicing(const Node& node) const override {
    return slice_rows(node, {0}, 1);
  }

  void infer(std::span<const Tensor> inputs, std::span<Shape> outputs) const override {
    outputs[0] = inputs[0].shape;
  }

  void run(std::span<const Tensor> inputs, std::span<const Tensor> outputs,
           std::span<std::byte> /*scratch*/) const override {
    const std::int64_t n = inputs[0].shape[-1];
    const std::int64_t rows = n == 0 ? 0 : inputs[0].shape.elements() / n;
    context_.pool->run_rows(rows, [&](std::int64_t row) {
      const float* x = inputs[0].as<const float>() + row * n;
      float* y = outputs[0].as<float>() + row * n;
      if (!is_log_) return context_.kernels.softmax(x, y, n);
      // x - largest - ln sum e^(x - largest)
      const float largest = context_.kernels.largest(x, n);
      std::transform(x, x + n, y, [largest](float v) { return v - largest; });
      context_.kernels.apply(Function::kExp, y, y, n);
      // In float: the C library of older systems lacks the logarithm in double.
      const float logarithm = std::log(static_cast<float>(context_.kernels.sum(y, n)));
      std::transform(x, x + n, y, [=](float v) { return v - largest - logarithm; });
    });
  }

 private:
  Context context_;
  bool is_log_;
};

// The norm of input + skip (+ bias): of squares, or a layer's, which has its own bias, beta.
class SkipNorm final : public Step {
 public:
  SkipNorm(const Node& node, const Context& context)
      : context_(context),
        name_(to_string(node)),
        epsilon_(node.number("epsilon", 1e-5F)),
        is_of_squares_(node.op_type == "SkipSimplifiedLayerNormalization"),
        bias_(is_of_squares_ ? 3 : 4) {
    for (std::size_t weight = 2; weight <= bias_; ++weight) check_weight(node, weight);
  }

  std::optional<Slicing> slicing(const Node& node) const override {
    return slice_rows(node, {0, 1}, 1);
  }

  void infer(std::span<const Tensor> inputs, std::span<Shape> outputs) const override {
    for (std::size_t weight = 2; weight <= bias_; ++weight) {
      if (is_given(inputs, weight)) check_weight(name_, inputs[0].shape, inputs[weight].shape);
    }
    if (!(inputs[0].shape == inputs[1].shape) && !repeats(inputs[0].shape, inputs[1].shape)) {
      unsupported("[", name_, "] expected input and skip of one shape, or a skip for each row of ",
                  "the batch, got ", to_string(inputs[0].shape), " and ",
                  to_string(inputs[1].shape));
    }
    for (Shape& output : outputs) output = inputs[0].shape;
  }

  void run(std::span<const Tensor> inputs, std::span<const Tensor> outputs,
           std::span<std::byte> /*scratch*/) const override {
    const std::int64_t n = inputs[0].shape[-1];
    const std::int64_t rows = n == 0 ? 0 : inputs[0].shape.elements() / n;
    const std::int64_t skips = rows == 0 ? 1 : inputs[1].shape.elements() / n;
    const auto given = [&](std::size_t input) {
      return is_given(inputs, input) ? inputs[input].as<const float>() : nullptr;
    };
    const float* bias = given(bias_);
    const float* beta = is_of_squares_ ? nullptr : given(3);
    auto* normed = outputs[0].as<float>();
    // A sum without a user is kept in the norm's output, which overwrites it.
    auto* sums = outputs.size() > 3 && outputs[3].data != nullptr ? outputs[3].as<float>() : normed;
    context_.pool->run_rows(rows, [&](std::int64_t row) {
      const std::int64_t at = row * n;
      context_.kernels.add(inputs[0].as<const float>() + at,
                           inputs[1].as<const float>() + row % skips * n, sums + at, n);
      if (bias != nullptr) context_.kernels.add(sums + at, bias, sums + at, n);
      if (is_of_squares_) {
        context_.kernels.rms_norm(sums + at, inputs[2].as<const float>(), epsilon_, normed + at, n);
      } else {
        context_.kernels.layer_norm(sums + at, inputs[2].as<const float>(), beta, epsilon_,
                                    normed + at, n);
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
  bool is_of_squares_;
  std::size_t bias_;
};

constexpr Port kLayerNorm[] = {{.name = "X", .types = kFloat, .shape = "[..,D]"},
                               {.name = "Scale", .types = kFloat},
                               optional({.name = "B", .types = kFloat})};
constexpr Port kRmsNorm[] = {{.name = "X", .types = kFloat, .shape = "[..,D]"},
                             {.name = "scale", .types = kFloat}};
constexpr Port kSkipRmsNorm[] = {
    {.name = "input", .types = kFloat, .shape = "[..,D]"},
    {.name = "skip", .types = kFloat, .shape = "[..,D]"},
    {.name = "gamma", .types = kFloat},
    {.name = "bias", .types = kFloat, .presence = Presence::kOptional}};
constexpr Port kSkipLayerNorm[] = {
    {.name = "input", .types = kFloat, .shape = "[..,D]"},
    {.name = "skip", .types = kFloat, .shape = "[..,D]"},
    {.name = "gamma", .types = kFloat},
    {.name = "beta", .types = kFloat, .presence = Presence::kOptional},
    {.name = "bias", .types = kFloat, .presence = Presence::kOptional}};
constexpr Port kSoftmax[] = {{.name = "input", .types = kFloat, .shape = "[..,N]"}};
constexpr Port kY[] = {{.name = "Y", .types = kFloat}};
constexpr Port kSkipOutputs[] = {{.name = "output", .types = kFloat},
                                 optional({.name = "mean", .types = kNone}),
                                 optional({.name = "inv_std_var", .types = kNone}),
                                 optional({.name = "input_skip_bias_sum", .types = kFloat})};
// stash_type, the type in which a norm is summed, can only be float.
constexpr AttributeRule kNorm[] = {axis("axis"), number("epsilon"), only("stash_type", 1)};
constexpr AttributeRule kSkipNorm[] = {number("epsilon")};
constexpr AttributeRule kAxis[] = {axis("axis")};

constexpr Operator kOperators[] = {
    {{"", "LayerNormalization", 1, 17, kLayerNorm, kY, kNorm}, make<LayerNorm>},
    {{"", "Softmax", 1, 13, kSoftmax, kY, kAxis}, make<Softmax>},
    {{"", "LogSoftmax", 1, 13, kSoftmax, kY, kAxis}, make<Softmax>},
    {{"", "SimplifiedLayerNormalization", 1, 1, kRmsNorm, kY, kNorm}, make<RmsNorm>},
    {{"", "RMSNormalization", 23, 23, kRmsNorm, kY, kNorm}, make<RmsNorm>},
    {{"com.microsoft", "SkipSimplifiedLayerNormalization", 1, 1, kSkipRmsNorm, kSkipOutputs,
      kSkipNorm},
     make<SkipNorm>},
    {{"com.microsoft", "SkipLayerNormalization", 1, 1, kSkipLayerNorm, kSkipOutputs, kSkipNorm},
     make<SkipNorm>},
};

}  // namespace

std::span<const Operator> normalization_operators() { return kOperators; }

}  // namespace flownpu::cpu
