// SPDX-License-Identifier: Apache-2.0
// Norms over the last axis: LayerNormalization; the RMS norms SimplifiedLayerNormalization and
// RMSNormalization (one operator under two names), and SkipSimplifiedLayerNormalization, which adds
// a residual first and hands out the sum as well; and Softmax.
#include "ops/cpu/cpu_step.h"
#include "ops/error.h"

namespace flownpu::cpu {
namespace {

void check_rank(const Node& node, std::size_t input) {
  const Value* x = node.input(input);
  if (x == nullptr || x->type != DataType::kFloat32) {
    fail("[", to_string(node), "] expected input ", input, " to be float, got ",
         x == nullptr ? "none" : name_of(x->type));
  }
  const std::int64_t axis = node.integer("axis", -1);
  if (axis != -1 && !(x->shape && axis == x->shape->rank() - 1)) {
    fail("[", to_string(node), "] expected a norm over the last axis, got axis ", axis);
  }
}

void check_weight(const std::string& name, const Tensor& x, const Tensor& weight) {
  if (weight.shape.rank() == 1 && weight.shape[0] == x.shape[-1]) return;
  fail("[", name, "] expected a weight of shape [", x.shape[-1], "], got ",
       to_string(weight.shape));
}

class RmsNorm final : public Step {
 public:
  RmsNorm(const Node& node, const Context& context)
      : context_(context), name_(to_string(node)), epsilon_(node.number("epsilon", 1e-5F)) {
    check_rank(node, 0);
    if (node.has_output(1)) fail("[", name_, "] expected one output, got inv_std_var as well");
  }

  std::optional<Slicing> slicing(const Node& node) const override {
    return slice_rows(node, {0}, 1);
  }

  void infer(std::span<const Tensor> inputs, std::span<Shape> outputs) const override {
    check_weight(name_, inputs[0], inputs[1]);
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
    check_rank(node, 0);
    if (node.has_output(1) || node.has_output(2))
      fail("[", name_, "] expected one output, got Mean or InvStdDev as well");
  }

  std::optional<Slicing> slicing(const Node& node) const override {
    return slice_rows(node, {0}, 1);
  }

  void infer(std::span<const Tensor> inputs, std::span<Shape> outputs) const override {
    check_weight(name_, inputs[0], inputs[1]);
    if (inputs.size() > 2 && inputs[2].present()) check_weight(name_, inputs[0], inputs[2]);
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
  Softmax(const Node& node, const Context& context) : context_(context) { check_rank(node, 0); }

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
      context_.kernels.softmax(inputs[0].as<const float>() + row * n,
                               outputs[0].as<float>() + row * n, n);
    });
  }

 private:
  Context context_;
};

class SkipRmsNorm final : public Step {
 public:
  SkipRmsNorm(const Node& node, const Context& context)
      : context_(context), name_(to_string(node)), epsilon_(node.number("epsilon", 1e-5F)) {
    check_rank(node, 0);
    if (node.input(3) != nullptr) fail("[", name_, "] expected no bias");
    if (node.has_output(1) || node.has_output(2)) {
      fail("[", name_, "] expected outputs 0 and 3 only, got mean or inv_std_var");
    }
  }

  std::optional<Slicing> slicing(const Node& node) const override {
    return slice_rows(node, {0, 1}, 1);
  }

  void infer(std::span<const Tensor> inputs, std::span<Shape> outputs) const override {
    check_weight(name_, inputs[0], inputs[2]);
    if (!(inputs[0].shape == inputs[1].shape)) {
      fail("[", name_, "] expected input and skip of one shape, got ", to_string(inputs[0].shape),
           " and ", to_string(inputs[1].shape));
    }
    for (Shape& output : outputs) output = inputs[0].shape;
  }

  void run(std::span<const Tensor> inputs, std::span<const Tensor> outputs,
           std::span<std::byte> /*scratch*/) const override {
    const std::int64_t n = inputs[0].shape[-1];
    const std::int64_t rows = n == 0 ? 0 : inputs[0].shape.elements() / n;
    auto* normed = outputs[0].as<float>();
    // Without a use for the sum, it is kept where the norm will overwrite it.
    auto* sums = outputs.size() > 3 && outputs[3].data != nullptr ? outputs[3].as<float>() : normed;
    context_.pool->run_rows(rows, [&](std::int64_t row) {
      const std::int64_t at = row * n;
      context_.kernels.add(inputs[0].as<const float>() + at, inputs[1].as<const float>() + at,
                           sums + at, n);
      context_.kernels.rms_norm(sums + at, inputs[2].as<const float>(), epsilon_, normed + at, n);
    });
  }

 private:
  Context context_;
  std::string name_;
  float epsilon_;
};

template <typename Made>
std::unique_ptr<Step> make(const Node& node, const Context& context) {
  return std::make_unique<Made>(node, context);
}

constexpr Operator kOperators[] = {
    {"", "LayerNormalization", make<LayerNorm>},
    {"", "Softmax", make<Softmax>},
    {"", "SimplifiedLayerNormalization", make<RmsNorm>},
    {"", "RMSNormalization", make<RmsNorm>},
    {"com.microsoft", "SkipSimplifiedLayerNormalization", make<SkipRmsNorm>},
};

}  // namespace

std::span<const Operator> normalization_operators() { return kOperators; }

}  // namespace flownpu::cpu
