// SPDX-License-Identifier: Apache-2.0
// Q4NXGather on the CPU: rows of a Q4NX table, dequantised.
#include "ops/cpu/products/q4nx_matmul.h"
#include "ops/error.h"
#include "ops/formats/q4nx.h"

namespace flownpu::cpu {
namespace {

class Q4NXGather final : public Step {
 public:
  Q4NXGather(const Node& node, const Context& context)
      : context_(context),
        name_(to_string(node)),
        m_(node.required_integer("M")),
        k_(node.required_integer("K")) {
    layout_ = q4nx_layout(node, 0, q4nx::row_blocks(m_), k_);
  }

  std::optional<Slicing> slicing(const Node& node) const override {
    return slice_rows(node, {1}, 0);
  }

  void infer(std::span<const Tensor> inputs, std::span<Shape> outputs) const override {
    outputs[0] = inputs[1].shape;
    outputs[0].append(k_);
  }

  void run(std::span<const Tensor> inputs, std::span<const Tensor> outputs,
           std::span<std::byte> /*scratch*/) const override {
    const Tensor& indices = inputs[1];
    const std::int64_t count = indices.shape.elements();
    for (std::int64_t i = 0; i < count; ++i) {
      if (const std::int64_t row = index(indices, i); row < 0 || row >= m_) {
        fail("[", name_, "] expected indices in [0, ", m_, "), got ", row, " at position ", i,
             ": is the tokenizer that of this model?");
      }
    }
    const Q4NXRows weight(inputs[0].as<const std::uint8_t>(), layout_, k_);
    auto* y = outputs[0].as<float>();
    context_.pool->run_rows(count, [&](std::int64_t i) {
      const std::int64_t row = index(indices, i);
      context_.kernels.dequantize_row(weight.from(row / q4nx::kBlockRows), row % q4nx::kBlockRows,
                                      k_, y + i * k_);
    });
  }

 private:
  static std::int64_t index(const Tensor& indices, std::int64_t i) {
    return indices.type == DataType::kInt64 ? indices.as<const std::int64_t>()[i]
                                            : indices.as<const std::int32_t>()[i];
  }

  Context context_;
  std::string name_;
  std::int64_t m_;
  std::int64_t k_;
  q4nx::Layout layout_;
};

}  // namespace

std::unique_ptr<Step> make_q4nx_gather(const Node& node, const Context& context) {
  return std::make_unique<Q4NXGather>(node, context);
}

}  // namespace flownpu::cpu
