// SPDX-License-Identifier: Apache-2.0
// DenseMatMul, whose weight stays on the device, and MatMul of two activations.
#include <algorithm>
#include <utility>
#include <vector>

#include "ops/error.h"
#include "ops/gpu/kernels/kernels.h"
#include "ops/gpu/operators/run.h"
#include "ops/gpu/operators/step.h"
#include "ops/transformer/graph/operators.h"

namespace flownpu::gpu {
namespace {

// W's index among the inputs (ops/transformer/graph/operators.h has those after it).
constexpr std::size_t kWeight = 1;

DenseActivation activation_of(const Node& node) {
  const std::string text = node.text("activation", "none");
  if (text == "gelu") return DenseActivation::kGelu;
  return text == "gelu_tanh" ? DenseActivation::kGeluTanh : DenseActivation::kNone;
}

// The host has checked the weight.
DenseShape shape_of(const Node& node) {
  const Value& weight = *node.input(kWeight);
  const bool transposed = node.integer("transposed", 0) != 0;
  const Shape sizes = weight.shape.value_or(Shape{0, 0});
  return {.rows = sizes[transposed ? 0 : 1],
          .columns = sizes[transposed ? 1 : 0],
          .given = element_of(node.input(0)->type),
          .weight = element_of(weight.type),
          .transposed = transposed,
          .has_scale = node.input(transformer::kDenseScale) != nullptr,
          .has_bias = node.input(transformer::kDenseBias) != nullptr,
          .activation = activation_of(node),
          .has_residual = node.input(transformer::kDenseResidual) != nullptr};
}

class DenseProduct final : public HostCheckedStep {
 public:
  DenseProduct(const Node& node, StepArguments arguments)
      : HostCheckedStep(node, std::move(arguments)), shape_(shape_of(node)) {}

  void infer(std::span<const Tensor> inputs, std::span<Shape> outputs) const override {
    HostCheckedStep::infer(inputs, outputs);
    if (!shape_.has_residual) return;
    // The kernel repeats the residual's rows, so its shape must be that of the product's last axes.
    const Shape& residual = inputs[transformer::kDenseResidual].shape;
    const Shape& product = outputs[0];
    const int front = product.rank() - residual.rank();
    bool ends_so = front >= 0 && product.elements() / std::max<std::int64_t>(shape_.rows, 1) ==
                                     inputs[0].shape.elements() / shape_.columns;
    for (int axis = 0; ends_so && axis < residual.rank(); ++axis)
      ends_so = residual[axis] == product[front + axis];
    if (!ends_so)
      unsupported("[", name(), "] expected a residual of the last axes of ", to_string(product),
                  ", whole, on device 'gpu', got ", to_string(residual), ": use device = cpu");
  }

  void run(std::span<const Tensor> inputs, std::span<const Tensor> outputs,
           std::span<std::byte> /*scratch*/) const override {
    const std::int64_t tokens = inputs[0].shape.elements() / shape_.columns;
    if (tokens == 0 || shape_.rows == 0) return;
    Run run(context());
    const Buffer* y = run.output(outputs[0]);
    std::vector<const Buffer*> buffers{at(run, inputs, 0), at(run, inputs, kWeight), y};
    std::vector<std::int64_t> parameters{tokens, shape_.rows, shape_.columns};
    if (shape_.has_scale) buffers.push_back(at(run, inputs, transformer::kDenseScale));
    if (shape_.has_bias) buffers.push_back(at(run, inputs, transformer::kDenseBias));
    if (shape_.has_residual) {
      buffers.push_back(at(run, inputs, transformer::kDenseResidual));
      parameters.push_back(inputs[transformer::kDenseResidual].shape.elements() / shape_.rows);
    }
    run.launch(*prepared({}, [&] { return dense_matmul(shape_); }).kernel,
               dense_matmul_grid(shape_, tokens), buffers, parameters);
    run.read(y, outputs[0]);
  }

 private:
  DenseShape shape_;
};

// Leading axes of one operand are those of the result, or the last of them; the kernel repeats
// these.
class ActivationsProduct final : public HostCheckedStep {
 public:
  ActivationsProduct(const Node& node, StepArguments arguments)
      : HostCheckedStep(node, std::move(arguments)), element_(element_of(node.outputs[0].type)) {}

  void run(std::span<const Tensor> inputs, std::span<const Tensor> outputs,
           std::span<std::byte> /*scratch*/) const override {
    const Shape& a = inputs[0].shape;
    const Shape& b = inputs[1].shape;
    const std::int64_t count = outputs[0].shape.elements();
    if (count == 0) return;
    const std::int64_t depth = a[-1];
    const std::int64_t rows = a.rank() == 1 ? 1 : a[-2];
    const std::int64_t columns = b.rank() == 1 ? 1 : b[-1];
    const std::int64_t batches = count / (rows * columns);
    const std::int64_t of_a = batches_of(a, outputs[0].shape, depth * rows);
    const std::int64_t of_b = batches_of(b, outputs[0].shape, depth * columns);
    Run run(context());
    const Buffer* y = run.output(outputs[0]);
    const std::vector buffers{at(run, inputs, 0), at(run, inputs, 1), y};
    run.launch(*prepared({}, [&] { return activations_matmul(element_); }).kernel,
               activations_matmul_grid(rows, columns, batches), buffers,
               std::vector{rows, depth, columns, of_a, of_b});
    run.read(y, outputs[0]);
  }

 private:
  std::int64_t batches_of(const Shape& factor, const Shape& result, std::int64_t of_one) const {
    if (of_one == 0) return 1;
    const std::int64_t batches = factor.elements() / of_one;
    std::int64_t last = 1;
    for (int axis = -3; -axis <= result.rank() && last < batches; --axis) last *= result[axis];
    if (last != batches)
      unsupported("[", name(),
                  "] expected factors whose leading axes are the last of those of the ", "product ",
                  to_string(result), " on device 'gpu', got ", to_string(factor),
                  ": use device = cpu");
    return batches;
  }

  Element element_;
};

}  // namespace

std::unique_ptr<Step> make_activations_product(const Node& node, StepArguments arguments) {
  return std::make_unique<ActivationsProduct>(node, std::move(arguments));
}

std::unique_ptr<Step> make_dense_product(const Node& node, StepArguments arguments) {
  const Shape shape = node.input(kWeight)->shape.value_or(Shape{0, 0});
  if (shape.elements() == 0)
    fail("[", to_string(node), "] expected a weight with elements on device 'gpu', got ",
         to_string(shape), ": use device = cpu");
  return std::make_unique<DenseProduct>(node, std::move(arguments));
}

}  // namespace flownpu::gpu
