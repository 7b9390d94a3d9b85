// SPDX-License-Identifier: Apache-2.0
#include "ops/cpu/products/q4nx_matmul.h"

#include <algorithm>
#include <cstring>

#include "ops/cpu/products/q4nx_matmul_plan.h"
#include "ops/error.h"
#include "ops/formats/q4nx.h"
#include "ops/nodes/q4nx_matmul.h"

namespace flownpu::cpu {
namespace {

enum class Gating : std::uint8_t { kNone, kGeglu, kSwiglu };

Gating gating_of(const Node& node) {
  const std::string text = node.text("gating", "none");
  return text == "geglu" ? Gating::kGeglu : text == "swiglu" ? Gating::kSwiglu : Gating::kNone;
}

class Q4NXMatMul : public Step {
 public:
  Q4NXMatMul(const Node& node, const Context& context)
      : context_(context),
        name_(to_string(node)),
        m_(node.required_integer("M")),
        k_(node.required_integer("K")),
        gating_(gating_of(node)) {
    if (gating_ != Gating::kNone && node.input(2) != nullptr)
      fail("[", name_, "] expected no bias with gating");
    row_blocks_ = q4nx::row_blocks(m_);
    layout_ = q4nx_layout(node, 1, gating_ == Gating::kNone ? row_blocks_ : 2 * row_blocks_, k_);
    // No longer than a weight that is there.
    padded_k_ = q4nx::ceil_div(k_, kPartColumns) * kPartColumns;
  }

  void infer(std::span<const Tensor> inputs, std::span<Shape> outputs) const override {
    const Shape& x = inputs[0].shape;
    // ONNX Runtime's MatMulNBits does not look at the width of no rows.
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
    RoundedActivations activations;
    take(scratch, inputs[0].shape.elements() / k_, activations);
    return scratch.bytes();
  }

  void run(std::span<const Tensor> inputs, std::span<const Tensor> outputs,
           std::span<std::byte> memory) const override {
    const std::int64_t rows = inputs[0].shape.elements() / k_;
    Scratch scratch(memory.data());
    RoundedActivations activations;
    take(scratch, rows, activations);
    round(inputs[0].as<const float>(), rows, activations);

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
      const std::int64_t each = kMaxProducts / (last - first);
      for (std::int64_t block = begin; block < end; block += each)
        multiply(weight, activations, first, last - first, block, std::min(each, end - block),
                 epilogue);
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
  // Values, scales and sums of `rows` rows; without memory, only counts.
  void take(Scratch& scratch, std::int64_t rows, RoundedActivations& a) const {
    const bool int8 = context_.activations == Activations::kInt8;
    a.padded_k = padded_k_;
    a.groups = padded_k_ / q4nx::kGroup;
    a.filled_groups = q4nx::ceil_div(k_, q4nx::kGroup);
    if (int8) a.order = context_.kernels.int8_order(rows);
    if (a.order == Int8Order::kPanels) {
      a.panels = {.rows = rows,
                  .values = scratch.take<std::int8_t>(rows * padded_k_),
                  .scales = scratch.take<float>(rows * padded_k_ / kPartColumns),
                  .sums = scratch.take<float>(rows * a.groups),
                  .offsets = scratch.take<std::int32_t>(rows * a.groups)};
      return;
    }
    a.values = scratch.take<std::byte>(rows * padded_k_ * (int8 ? 1 : 2));
    a.part_columns = a.order == Int8Order::kParts ? kPartColumns : q4nx::kGroup;
    const std::int64_t parts = padded_k_ / a.part_columns;
    a.scales = int8 ? scratch.take<float>(rows * parts) : nullptr;
    a.sums = scratch.take<float>(rows * parts);
  }

  void round(const float* x, std::int64_t rows, const RoundedActivations& a) const {
    const Kernels& kernels = context_.kernels;
    auto* values = static_cast<std::byte*>(const_cast<void*>(a.values));
    auto* scales = const_cast<float*>(a.scales);
    auto* sums = const_cast<float*>(a.sums);
    const std::int64_t parts = padded_k_ / a.part_columns;
    context_.pool->run_rows(rows, [&](std::int64_t row) {
      const float* source = x + row * k_;
      float* row_sums = sums + row * parts;
      if (a.order == Int8Order::kPanels) {
        kernels.round_to_panels(source, k_, padded_k_ / kPartColumns, row, a.panels);
      } else if (scales != nullptr) {
        kernels.round_to_int8(source, k_, padded_k_, a.part_columns, values + row * padded_k_,
                              scales + row * parts, row_sums);
      } else {
        kernels.round_to_bf16(source, k_, padded_k_, values + row * padded_k_ * 2, row_sums);
      }
    });
  }

  // Rows of blocks (and their partners of the up projection) times `count` rows of activations,
  // epilogue included.
  void multiply(const Q4NXRows& weight, const RoundedActivations& a, std::int64_t first,
                std::int64_t count, std::int64_t block, std::int64_t row_blocks,
                const ProductEpilogue& epilogue) const {
    alignas(64) std::byte scratch[kMatMulScratchBytes];
    alignas(64) float product[kMaxProducts * q4nx::kBlockRows];
    alignas(64) float up[kMaxProducts * q4nx::kBlockRows];
    const Kernels& kernels = context_.kernels;
    const MatMulBlocks matmul =
        context_.activations == Activations::kInt8 ? kernels.matmul_int8 : kernels.matmul_bf16;
    matmul(weight.from(block), row_blocks, a, first, count, scratch, product);
    if (gating_ != Gating::kNone) {
      matmul(weight.from(row_blocks_ + block), row_blocks, a, first, count, scratch, up);
      const auto gate = gating_ == Gating::kGeglu ? kernels.geglu : kernels.swiglu;
      gate(product, up, product, row_blocks * count * q4nx::kBlockRows);
    }
    kernels.finish_product(product, row_blocks, first, count, block * q4nx::kBlockRows, epilogue);
  }

  Context context_;
  std::string name_;
  std::int64_t m_;
  std::int64_t k_;
  Gating gating_;
  std::int64_t padded_k_ = 0;
  std::int64_t row_blocks_ = 0;
  q4nx::Layout layout_;
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

constexpr Types kUInt8{DataType::kUInt8};
constexpr Port kProduct[] = {
    {.name = "X", .types = kFloat, .shape = "[..,K]"},
    {.name = "W", .types = kUInt8, .shape = "[?,?,?]", .constant = true},
    {.name = "bias", .types = kFloat, .presence = Presence::kOptional, .shape = "[..,M]"},
    {.name = "residual", .types = kFloat, .presence = Presence::kOptional, .shape = "[..,M]"}};
static_assert(std::size(kProduct) == kProductInputs && kProduct[kProductX].name == "X" &&
              kProduct[kProductBias].name == "bias" &&
              kProduct[kProductResidual].name == "residual");
constexpr Port kY[] = {{.name = "Y", .types = kFloat}};
constexpr AttributeRule kSizesAndGating[] = {required(count("M", 1)), required(count("K", 1)),
                                             text("gating", "none|geglu|swiglu")};
constexpr Port kGather[] = {{.name = "W", .types = kUInt8, .shape = "[?,?,?]", .constant = true},
                            {.name = "indices", .types = kIntegers}};
constexpr AttributeRule kSizes[] = {required(count("M", 1)), required(count("K", 1))};

constexpr Operator kOperators[] = {
    {{kDomain, "Q4NXMatMul", 1, 1, kProduct, kY, kSizesAndGating}, make_q4nx_matmul},
    {{kDomain, "FusedDQP", 1, 1, kProduct, kY, kSizesAndGating}, make_fused_dqp},
    {{kDomain, "Q4NXGather", 1, 1, kGather, kY, kSizes}, make_q4nx_gather},
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
