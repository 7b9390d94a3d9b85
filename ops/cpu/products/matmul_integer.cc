// SPDX-License-Identifier: Apache-2.0
// MatMulInteger: (A - a_zero_point) (B - b_zero_point) of 8-bit integers in int32, exact. ONNX
// Runtime's dynamic quantisation writes it between DynamicQuantizeLinear and a Mul by the scales;
// ops/lowering/dynamic_product.cc makes one product of these. This step serves what is left.
#include <algorithm>
#include <string>

#include "ops/cpu/integers.h"
#include "ops/cpu/step.h"
#include "ops/error.h"

namespace flownpu::cpu {
namespace {

class MatMulInteger final : public Step {
 public:
  MatMulInteger(const Node& node, const Context& context)
      : context_(context), name_(to_string(node)) {
    const Value* b = node.input(1);
    if (b->shape && (*b->shape)[0] >= 0 && (*b->shape)[1] >= 0)
      multiply_adds_ = b->shape->elements();
  }

  void infer(std::span<const Tensor> inputs, std::span<Shape> outputs) const override {
    const Shape& a = inputs[0].shape;
    const Shape& b = inputs[1].shape;
    if (a[-1] != b[0])
      fail("[", name_, "] expected A [.., ", b[0], "] for B ", to_string(b), ", got ",
           to_string(a));
    if (is_given(inputs, 2) && inputs[2].shape.elements() != 1)
      unsupported("[", name_, "] expected one a_zero_point, got ", to_string(inputs[2].shape));
    const std::int64_t zeros = is_given(inputs, 3) ? inputs[3].shape.elements() : 1;
    if (zeros != 1 && zeros != b[1])
      fail("[", name_, "] expected one b_zero_point or ", b[1], ", got ",
           to_string(inputs[3].shape));
    outputs[0] = a;
    outputs[0][-1] = b[1];
  }

  // Each task makes some columns of all rows, kColumns at a time, from kDepth rows of B at a time,
  // widened to 16 bits less their zero points.
  void run(std::span<const Tensor> inputs, std::span<const Tensor> outputs,
           std::span<std::byte> /*scratch*/) const override {
    const Tensor& a = inputs[0];
    const std::int64_t k = inputs[1].shape[0];
    const std::int64_t m = inputs[1].shape[1];
    const std::int64_t rows = outputs[0].shape.elements() / std::max<std::int64_t>(m, 1);
    const int a_zero = is_given(inputs, 2) ? byte_at(inputs[2], 0) : 0;
    context_.pool->run((m + kColumns - 1) / kColumns, [&](std::int64_t task) {
      const std::int64_t begin = task * kColumns;
      const std::int64_t count = std::min(kColumns, m - begin);
      auto* y = outputs[0].as<std::int32_t>() + begin;
      for (std::int64_t row = 0; row < rows; ++row) std::fill_n(y + row * m, count, 0);
      std::int16_t columns[kDepth][kColumns] = {};
      for (std::int64_t start = 0; start < k; start += kDepth) {
        const std::int64_t depth = std::min(kDepth, k - start);
        widen(inputs, start, depth, begin, count, columns);
        for (std::int64_t row = 0; row < rows; ++row) {
          std::int32_t sums[kColumns] = {};
          for (std::int64_t i = 0; i < depth; ++i) {
            const auto factor = static_cast<std::int16_t>(byte_at(a, row * k + start + i) - a_zero);
            for (std::int64_t c = 0; c < kColumns; ++c) sums[c] += factor * columns[i][c];
          }
          for (std::int64_t c = 0; c < count; ++c) y[row * m + c] += sums[c];
        }
      }
    });
  }

  std::int64_t multiply_adds() const override { return multiply_adds_; }

 private:
  static constexpr std::int64_t kColumns = 32;
  // Widened rows of 32 columns fill half of an L1 data cache of 32 KB.
  static constexpr std::int64_t kDepth = 256;

  static void widen(std::span<const Tensor> inputs, std::int64_t start, std::int64_t depth,
                    std::int64_t begin, std::int64_t count, std::int16_t (*columns)[kColumns]) {
    const std::int64_t m = inputs[1].shape[1];
    const bool is_one = !is_given(inputs, 3) || inputs[3].shape.elements() == 1;
    for (std::int64_t c = 0; c < count; ++c) {
      const int zero = is_given(inputs, 3) ? byte_at(inputs[3], is_one ? 0 : begin + c) : 0;
      for (std::int64_t i = 0; i < depth; ++i)
        columns[i][c] =
            static_cast<std::int16_t>(byte_at(inputs[1], (start + i) * m + begin + c) - zero);
    }
  }

  Context context_;
  std::string name_;
  std::int64_t multiply_adds_ = 0;
};

constexpr Port kFactors[] = {
    {.name = "A", .types = kBytes, .shape = "[..,?]", .type_letter = 'A'},
    {.name = "B", .types = kBytes, .shape = "[?,?]", .type_letter = 'B'},
    optional({.name = "a_zero_point", .types = kBytes, .type_letter = 'A'}),
    optional({.name = "b_zero_point", .types = kBytes, .type_letter = 'B'})};
constexpr Port kSums[] = {{.name = "Y", .types = kInt32}};
constexpr Operator kOperators[] = {
    {{"", "MatMulInteger", 10, 10, kFactors, kSums}, make<MatMulInteger>}};

}  // namespace

std::span<const Operator> matmul_integer_operators() { return kOperators; }

}  // namespace flownpu::cpu
