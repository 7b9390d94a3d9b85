// SPDX-License-Identifier: Apache-2.0
// DenseMatMul, whose weight stays on the device.
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
      : HostCheckedStep(std::move(arguments)),
        name_(to_string(node)),
        shape_(shape_of(node)),
        weight_(upload(context(), *node.input(kWeight))) {}

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
      unsupported("[", name_, "] expected a residual of the last axes of ", to_string(product),
                  ", whole, on device 'gpu', got ", to_string(residual), ": use device = cpu");
  }

  void run(std::span<const Tensor> inputs, std::span<const Tensor> outputs,
           std::span<std::byte> /*scratch*/) const override {
    const std::int64_t tokens = inputs[0].shape.elements() / shape_.columns;
    if (tokens == 0 || shape_.rows == 0) return;
    Run run(context());
    const Buffer* y = run.output(outputs[0].bytes());
    std::vector<const Buffer*> buffers{run.input(inputs[0]), &weight_, y};
    std::vector<std::int64_t> parameters{tokens};
    if (shape_.has_scale) buffers.push_back(run.input(inputs[transformer::kDenseScale]));
    if (shape_.has_bias) buffers.push_back(run.input(inputs[transformer::kDenseBias]));
    if (shape_.has_residual) {
      const Tensor& residual = inputs[transformer::kDenseResidual];
      buffers.push_back(run.input(residual));
      parameters.push_back(residual.shape.elements() / shape_.rows);
    }
    run.launch(dense_matmul(shape_), dense_matmul_grid(shape_, tokens), buffers, parameters);
    run.read(y, outputs[0]);
  }

 private:
  std::string name_;
  DenseShape shape_;
  Buffer weight_;
};

}  // namespace

std::unique_ptr<Step> make_dense_product(const Node& node, StepArguments arguments) {
  const Shape shape = node.input(kWeight)->shape.value_or(Shape{0, 0});
  if (shape.elements() == 0)
    fail("[", to_string(node), "] expected a weight with elements on device 'gpu', got ",
         to_string(shape), ": use device = cpu");
  return std::make_unique<DenseProduct>(node, std::move(arguments));
}

}  // namespace flownpu::gpu
