// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <string>
#include <utility>

#include "ops/formats/q4nx.h"
#include "ops/npu/operators/steps.h"
#include "ops/transformer/graph/operators.h"

namespace flownpu::npu {
namespace {

// The operations that follow a product; `bias` and `residual` are indices among the node's inputs.
struct Epilogue {
  std::size_t bias = kProductBias;
  std::size_t residual = kProductResidual;
  cpu::Function activation = cpu::Function::kNone;
  // act(gate) * up, where the up projection begins `up` elements behind the gate; null: no gating.
  void (*gate)(const float* gate, const float* up, float* y, std::int64_t n) = nullptr;
  std::int64_t up = 0;
};

Epilogue epilogue_of(const Node& node, const cpu::Kernels& kernels) {
  Epilogue epilogue;
  if (transformer::is_dense_product(node)) {
    const std::string activation = node.text("activation", "none");
    epilogue.bias = transformer::kDenseBias;
    epilogue.residual = transformer::kDenseResidual;
    if (activation == "gelu") epilogue.activation = cpu::Function::kGelu;
    if (activation == "gelu_tanh") epilogue.activation = cpu::Function::kGeluTanh;
    return epilogue;
  }
  const std::string gating = node.text("gating", "none");
  if (gating == "none") return epilogue;
  epilogue.gate = gating == "geglu" ? kernels.geglu : kernels.swiglu;
  epilogue.up = q4nx::row_blocks(node.required_integer("M")) * q4nx::kBlockRows;
  return epilogue;
}

class ProductStep final : public Step {
 public:
  ProductStep(const Node& node, std::int64_t least_of_one_row,
              std::unique_ptr<OperatorPrograms> programs, std::unique_ptr<Step> host,
              const cpu::Context& context)
      : programs_(std::move(programs)),
        host_(std::move(host)),
        context_(context),
        epilogue_(epilogue_of(node, context.kernels)),
        least_of_one_row_(least_of_one_row),
        columns_(programs_->description().sizes.front().required_integer("columns")) {}

  void infer(std::span<const Tensor> inputs, std::span<Shape> outputs) const override {
    host_->infer(inputs, outputs);
  }
  std::size_t scratch_bytes(std::span<const Tensor> inputs) const override {
    cpu::Scratch scratch;
    scratch.take<float>(rows_of(inputs[0]) * columns_);
    return std::max(scratch.bytes(), host_->scratch_bytes(inputs));
  }
  std::optional<Slicing> slicing(const Node& node) const override {
    return host_->slicing(operator_of_graph(node));
  }
  std::int64_t multiply_adds() const override { return host_->multiply_adds(); }

  void run(std::span<const Tensor> inputs, std::span<const Tensor> outputs,
           std::span<std::byte> memory) const override {
    const std::int64_t rows = rows_of(inputs[0]);
    const Tensor* residual = find(inputs, epilogue_.residual);
    const bool broadcast = residual != nullptr && !(residual->shape == outputs[0].shape);
    if (broadcast || !is_worth(rows)) return host_->run(inputs, outputs, memory);
    cpu::Scratch scratch(memory.data());
    auto* product = scratch.take<float>(rows * columns_);
    {
      const std::unique_lock lock = programs_->begin();
      programs_->multiply(inputs[0].as<const float>(), rows, product);
    }
    finish(product, rows, find(inputs, epilogue_.bias), residual, outputs[0]);
  }

 private:
  bool is_worth(std::int64_t rows) const {
    const std::int64_t multiply_adds = programs_->description().multiply_adds;
    if (rows == 1 && programs_->records().front()->tokens == 1)
      return multiply_adds >= least_of_one_row_;
    return programs_->is_worth(rows * multiply_adds,
                               dispatches_of(parts_of(programs_->records(), rows)));
  }
  static const Tensor* find(std::span<const Tensor> inputs, std::size_t index) {
    return index < inputs.size() && inputs[index].present() ? &inputs[index] : nullptr;
  }
  // Not elements / columns: rows of X may have no elements.
  static std::int64_t rows_of(const Tensor& x) {
    return Shape(x.shape.begin(), static_cast<std::size_t>(x.shape.rank() - 1)).elements();
  }

  // Applies the epilogue in place, and writes to y.
  void finish(float* product, std::int64_t rows, const Tensor* bias, const Tensor* residual,
              const Tensor& y) const {
    const cpu::Kernels& kernels = context_.kernels;
    const std::int64_t m = y.shape[-1];
    context_.pool->run_rows(rows, [&](std::int64_t row) {
      float* from = product + row * columns_;
      float* to = y.as<float>() + row * m;
      if (bias != nullptr) kernels.add(from, bias->as<const float>(), from, m);
      if (epilogue_.gate != nullptr) {
        epilogue_.gate(from, from + epilogue_.up, from, m);
      } else if (epilogue_.activation != cpu::Function::kNone) {
        kernels.apply(epilogue_.activation, from, from, m);
      }
      if (residual == nullptr) {
        std::copy_n(from, m, to);
      } else {
        kernels.add(from, residual->as<const float>() + row * m, to, m);
      }
    });
  }

  std::unique_ptr<OperatorPrograms> programs_;
  std::unique_ptr<Step> host_;
  cpu::Context context_;
  Epilogue epilogue_;
  std::int64_t least_of_one_row_;
  std::int64_t columns_;
};

}  // namespace

std::unique_ptr<Step> make_product_step(const Node& node,
                                        std::unique_ptr<OperatorPrograms> programs,
                                        std::unique_ptr<Step> host, const cpu::Context& context) {
  return std::make_unique<ProductStep>(operator_of_graph(node),
                                       node.required_integer(kLeastOfOneRow), std::move(programs),
                                       std::move(host), context);
}

}  // namespace flownpu::npu
