// SPDX-License-Identifier: Apache-2.0
#include "ops/cpu/products/q4nx_matmul.h"

#include "ops/cpu/products/q4nx_matmul_plan.h"
#include "ops/cpu/products/q4nx_product.h"
#include "ops/error.h"
#include "ops/formats/q4nx.h"
#include "ops/nodes/q4nx_matmul.h"

namespace flownpu::cpu {
namespace {

class Q4NXMatMul : public Step {
 public:
  Q4NXMatMul(const Node& node, const Context& context)
      : context_(context),
        name_(to_string(node)),
        m_(node.required_integer("M")),
        k_(node.required_integer("K")),
        gating_(gating_of(node, "none")),
        row_blocks_(q4nx::row_blocks(m_)),
        layout_(q4nx_layout(node, 1, gating_ == Gating::kNone ? row_blocks_ : 2 * row_blocks_, k_)),
        product_(context, k_, layout_, gating_) {
    if (gating_ != Gating::kNone && node.input(2) != nullptr)
      fail("[", name_, "] expected no bias with gating");
  }

  void infer(std::span<const Tensor> inputs, std::span<Shape> outputs) const override {
    const Shape& x = inputs[0].shape;
    // ONNX Runtime's MatMulNBits does not check the width of an X without rows.
    if (x.rank() > 0 && x[-1] != k_ && x.elements() == 0) {
      unsupported("[", name_, "] expected X of shape [.., ", k_, "], got ", to_string(x));
    }
    if (x.rank() == 0 || x[-1] != k_) {
      fail("[", name_, "] expected X of shape [.., ", k_, "], got ", to_string(x));
    }
    outputs[0] = x;
    outputs[0][-1] = m_;
    if (inputs.size() > 2 && inputs[2].present() && inputs[2].shape.elements() != m_) {
      fail("[", name_, "] expected a bias of ", m_, " elements, got ", to_string(inputs[2].shape));
    }
    if (inputs.size() > 3 && inputs[3].present() && !(inputs[3].shape == outputs[0])) {
      fail("[", name_, "] expected a residual of shape ", to_string(outputs[0]), ", got ",
           to_string(inputs[3].shape));
    }
  }

  std::size_t scratch_bytes(std::span<const Tensor> inputs) const override {
    Scratch scratch;
    take(scratch, inputs[0].shape.elements() / k_);
    return scratch.bytes();
  }

  void run(std::span<const Tensor> inputs, std::span<const Tensor> outputs,
           std::span<std::byte> memory) const override {
    const std::int64_t rows = inputs[0].shape.elements() / k_;
    Scratch scratch(memory.data());
    const RoundedActivations activations = take(scratch, rows);
    const float* x = inputs[0].as<const float>();
    context_.pool->run_rows(
        rows, [&](std::int64_t row) { product_.round(x + row * k_, activations, row); });

    if (rows == 0) return;
    const MatMulPlan plan = plan_matmul(rows, row_blocks_, context_.pool->threads());
    const Q4NXRows weight(inputs[1].as<const std::uint8_t>(), layout_, k_);
    const ProductEpilogue epilogue{
        .bias = inputs.size() > 2 ? inputs[2].as<const float>() : nullptr,
        .residual = inputs.size() > 3 ? inputs[3].as<const float>() : nullptr,
        .y = outputs[0].as<float>(),
        .m = m_,
        .streamed = rows * m_ * static_cast<std::int64_t>(sizeof(float)) > kStreamedBytes};
    context_.pool->run(plan.row_parts * plan.block_parts, [&](std::int64_t task) {
      const auto [first, last] = part(rows, plan.row_parts, task / plan.block_parts);
      const auto [begin, end] = part(row_blocks_, plan.block_parts, task % plan.block_parts);
      const std::int64_t count = last - first;
      product_.multiply(
          weight, row_blocks_ * weight.row_bytes, activations, first, count, begin, end,
          [&, first = first](const float* product, std::int64_t block, std::int64_t blocks) {
            context_.kernels.finish_product(product, blocks, first, count, block * q4nx::kBlockRows,
                                            epilogue);
          });
    });
  }

  std::optional<std::size_t> streamed_input() const override { return 1; }

  std::optional<Slicing> slicing(const Node& node) const override {
    return slice_rows(node, {0, 3}, 1);
  }

  std::int64_t multiply_adds() const override {
    return m_ * k_ * (gating_ == Gating::kNone ? 1 : 2);
  }

 private:
  // Memory for the rows' activations; without memory, only counts.
  RoundedActivations take(Scratch& scratch, std::int64_t rows) const {
    return product_.take(scratch, rows);
  }

  Context context_;
  std::string name_;
  std::int64_t m_;
  std::int64_t k_;
  Gating gating_;
  std::int64_t row_blocks_;
  q4nx::Layout layout_;
  Q4NXProduct product_;
};

class FusedDQP final : public Q4NXMatMul {
 public:
  using Q4NXMatMul::Q4NXMatMul;

  void infer(std::span<const Tensor> inputs, std::span<Shape> outputs) const override {
    Q4NXMatMul::infer(inputs, outputs);
    const Shape& x = inputs[0].shape;
    if (x.elements() != x[-1]) {
      fail("[FusedDQP] expected one row, got X of shape ", to_string(x),
           ": use Q4NXMatMul for several rows");
    }
  }
};

constexpr Operator kOperators[] = {
    {kQ4nxMatMul, make_q4nx_matmul},
    {kFusedDqp, make_fused_dqp},
    {kQ4nxGather, make_q4nx_gather},
};

}  // namespace

q4nx::Layout q4nx_layout(const Node& node, std::size_t input, std::int64_t row_blocks,
                         std::int64_t k) {
  const Value* weight = node.input(input);
  const Shape shape = weight->shape.value_or(Shape{});
  const q4nx::Layout layout = q4nx::layout_of(shape).value_or(q4nx::kNarrow);
  const Shape expected{row_blocks, layout.column_blocks(k), layout.block_bytes()};
  if (!(shape == expected)) {
    fail("[", to_string(node), "] expected weight '", weight->name, "' of shape ",
         to_string(expected), ", got ", weight->shape ? to_string(shape) : "of unknown shape");
  }
  return layout;
}

std::unique_ptr<Step> make_q4nx_matmul(const Node& node, const Context& context) {
  return std::make_unique<Q4NXMatMul>(node, context);
}

std::unique_ptr<Step> make_fused_dqp(const Node& node, const Context& context) {
  return std::make_unique<FusedDQP>(node, context);
}

std::span<const Operator> q4nx_operators() { return kOperators; }

}  // namespace flownpu::cpu
