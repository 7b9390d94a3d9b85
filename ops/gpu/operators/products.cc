// SPDX-License-Identifier: Apache-2.0
// Q4NXMatMul, FusedDQP and Q4NXGather, whose weights stay on the device. A single row is multiplied
// unrounded (dequantisation fused); several are rounded to int8 first, unless activations = bf16,
// which on this device rounds nothing.
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ops/error.h"
#include "ops/gpu/kernels/kernels.h"
#include "ops/gpu/kernels/matrices/q4nx_matmul.h"
#include "ops/gpu/operators/run.h"
#include "ops/gpu/operators/step.h"
#include "ops/nodes/q4nx_matmul.h"

namespace flownpu::gpu {
namespace {

// The shape of a weight, which the host has checked; without elements if it is unknown.
Shape shape_of(const Value& weight) { return weight.shape.value_or(Shape{0}); }

q4nx::Layout layout_of(const Node& node, std::size_t weight) {
  return q4nx::layout_of(shape_of(*node.input(weight))).value_or(q4nx::kNarrow);
}

Gating gating_of(const Node& node) {
  const std::string gating = node.text("gating", "none");
  if (gating == "none") return Gating::kNone;
  return gating == "geglu" ? Gating::kGeGlu : Gating::kSwiGlu;
}

class Product final : public HostCheckedStep {
 public:
  // Teams, the weight's storage and matrix units are chosen here.
  Product(const Node& node, Activations activations, GpuWeights weights, GpuMatrices matrices,
          StepArguments arguments)
      : HostCheckedStep(node, std::move(arguments)),
        shape_{.rows = node.required_integer("M"),
               .columns = node.required_integer("K"),
               .layout = layout_of(node, kProductWeight),
               .gating = gating_of(node),
               .has_bias = node.input(kProductBias) != nullptr,
               .has_residual = node.input(kProductResidual) != nullptr},
        rounds_(activations == Activations::kInt8),
        weight_(upload(context(), *node.input(kProductWeight))) {
    shape_.teams = teams_for(shape_, context().facts()).front();
    shape_.storage = storages_for(weights, weight_.bytes(), context().facts()).front();
    if (shape_.storage == Storage::kImage) image_ = context().image_of(weight_);
    if (!rounds_) return;
    const std::lock_guard lock(context().mutex());
    if (ways_with_matrices(matrices, shape_, context()).front())
      matrices_ = context().facts().matrices;
  }

  void run(std::span<const Tensor> inputs, std::span<const Tensor> outputs,
           std::span<std::byte> /*scratch*/) const override {
    const std::int64_t tokens = inputs[kProductX].shape.elements() / shape_.columns;
    if (tokens == 0) return;
    Run run(context());
    const Buffer* y = run.output(outputs[0]);
    // In the order of fused_dqp's.
    std::vector<const Buffer*> buffers{run.input(inputs[kProductX]),
                                       shape_.storage == Storage::kImage ? &image_ : &weight_, y};
    if (shape_.has_bias) buffers.push_back(at(run, inputs, kProductBias));
    if (shape_.has_residual) buffers.push_back(at(run, inputs, kProductResidual));
    if (tokens == 1 || !rounds_) {
      run.launch(fused_dqp(shape_), fused_dqp_grid(shape_, tokens), buffers, {});
    } else {
      multiply_rounded(run, tokens, std::move(buffers));
    }
    run.read(y, outputs[0]);
  }

 private:
  void multiply_rounded(Run& run, std::int64_t tokens, std::vector<const Buffer*> buffers) const {
    const std::int64_t groups = q4nx::groups_of(shape_.columns);
    const auto count = static_cast<std::size_t>(tokens * groups);
    const Buffer* codes = run.output(count * q4nx::kGroup);
    const Buffer* scales = run.output(count * sizeof(float));
    const Buffer* sums = run.output(count * sizeof(float));
    run.launch(quantize_rows(shape_.columns), quantize_rows_grid(shape_.columns, tokens),
               {buffers.front(), codes, scales, sums});
    buffers.erase(buffers.begin());
    buffers.insert(buffers.begin(), {codes, scales, sums});
    if (matrices_.has_value()) {
      run.launch(q4nx_matmul_of_matrices(shape_, *matrices_),
                 q4nx_matmul_of_matrices_grid(shape_, tokens), buffers, std::vector{tokens});
      return;
    }
    run.launch(q4nx_matmul(shape_), q4nx_matmul_grid(shape_, tokens), buffers, std::vector{tokens});
  }

  ProductShape shape_;
  bool rounds_;
  std::optional<MatrixUnits> matrices_;  // those that multiply rounded rows
  Buffer weight_;
  Buffer image_;  // of the weight, if kernels read it so
};

class Gather final : public HostCheckedStep {
 public:
  Gather(const Node& node, StepArguments arguments)
      : HostCheckedStep(node, std::move(arguments)),
        rows_(node.required_integer("M")),
        columns_(node.required_integer("K")),
        layout_(layout_of(node, 0)),
        table_(upload(context(), *node.input(0))) {}

  void run(std::span<const Tensor> inputs, std::span<const Tensor> outputs,
           std::span<std::byte> /*scratch*/) const override {
    const std::vector<std::int32_t> indices = indices_of(inputs[1]);
    if (indices.empty()) return;
    const auto count = static_cast<std::int64_t>(indices.size());
    Run run(context());
    const Buffer* y = run.output(outputs[0]);
    run.launch(q4nx_gather(rows_, columns_, layout_), q4nx_gather_grid(columns_, count),
               {&table_, run.input(std::span<const std::int32_t>(indices)), y});
    run.read(y, outputs[0]);
  }

 private:
  // Throws Error for an index beyond the table, because the kernel does not check indices.
  std::vector<std::int32_t> indices_of(const Tensor& tensor) const {
    std::vector<std::int32_t> indices;
    for (std::int64_t i = 0; i < tensor.shape.elements(); ++i) {
      const std::int64_t row = tensor.type == DataType::kInt64 ? tensor.as<const std::int64_t>()[i]
                                                               : tensor.as<const std::int32_t>()[i];
      if (row < 0 || row >= rows_)
        fail("[Q4NXGather] expected indices in [0, ", rows_, "), got ", row, " at position ", i,
             ": is the tokenizer that of this model?");
      indices.push_back(static_cast<std::int32_t>(row));
    }
    return indices;
  }

  std::int64_t rows_;
  std::int64_t columns_;
  q4nx::Layout layout_;
  Buffer table_;
};

}  // namespace

std::unique_ptr<Step> make_product(const Node& node, StepArguments arguments) {
  const Activations activations = arguments.activations;
  const GpuWeights weights = arguments.weights;
  const GpuMatrices matrices = arguments.matrices;
  return std::make_unique<Product>(node, activations, weights, matrices, std::move(arguments));
}

std::unique_ptr<Step> make_gather(const Node& node, StepArguments arguments) {
  return std::make_unique<Gather>(node, std::move(arguments));
}

}  // namespace flownpu::gpu
