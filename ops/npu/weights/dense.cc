// SPDX-License-Identifier: Apache-2.0
#include "ops/npu/weights/dense.h"

#include <cstddef>
#include <cstring>
#include <utility>
#include <vector>

#include "ops/error.h"
#include "ops/formats/numbers.h"
#include "ops/formats/q4nx_layouts.h"
#include "ops/npu/nodes/lowered_node.h"
#include "ops/transformer/decoder_constants.h"
#include "ops/transformer/graph/operators.h"

namespace flownpu::npu {
namespace {

bool is_constant(const Value* value, DataType type, int rank) {
  return value != nullptr && value->constant != nullptr && value->type == type &&
         shape_of(value).rank() == rank;
}

template <typename T>
const T* data_of(const Value& value) {
  return static_cast<const T*>(value.constant);
}

// A weight [K, N] or, if transposed, [N, K]; `widen(element)` converts an element to float.
template <typename T, typename Widen>
DenseWeight of_elements(const Value& weight, bool transposed, const Widen& widen) {
  const Shape shape = shape_of(&weight);
  DenseWeight found{.inner = shape[transposed ? 1 : 0], .columns = shape[transposed ? 0 : 1]};
  const std::int64_t down = transposed ? 1 : found.columns;
  const std::int64_t across = transposed ? found.inner : 1;
  found.read_row = [owner = weight.owner, data = data_of<T>(weight), down, across, widen](
                       std::int64_t k, std::span<float> row) {
    const T* element = data + k * down;
    for (float& value : row) {
      value = widen(*element);
      element += across;
    }
  };
  return found;
}

DenseWeight scaled(DenseWeight weight, const Node& product) {
  const float* scales = float_constant(product, transformer::kDenseScale, Shape{weight.columns});
  weight.read_row = [owner = product.inputs[transformer::kDenseScale].owner, scales,
                     codes = std::move(weight.read_row)](std::int64_t k, std::span<float> row) {
    codes(k, row);
    for (std::size_t n = 0; n < row.size(); ++n) row[n] *= scales[n];
  };
  return weight;
}

DenseWeight of_dense(const Node& product) {
  const Value* weight = product.input(1);
  const bool transposed = product.integer("transposed", 0) != 0;
  if (is_constant(weight, DataType::kFloat32, 2))
    return of_elements<float>(*weight, transposed, [](float value) { return value; });
  if (is_constant(weight, DataType::kBFloat16, 2))
    return of_elements<std::uint16_t>(*weight, transposed, from_bfloat16);
  if (is_constant(weight, DataType::kFloat16, 2))
    return of_elements<std::uint16_t>(*weight, transposed, from_half);
  if (is_constant(weight, DataType::kInt8, 2)) {
    const auto widen = [](std::int8_t code) { return static_cast<float>(code); };
    return scaled(of_elements<std::int8_t>(*weight, transposed, widen), product);
  }
  fail(to_string(product),
       ": expected W to be an initializer of two axes: float, bfloat16, float16 or int8");
}

// w[m, k] dequantised; of a gated weight, the gate's.
float value_at(const transformer::Q4NXWeight& weight, std::int64_t m, std::int64_t k) {
  const q4nx::Layout& layout = weight.layout;
  const std::byte* blocks = weight.blocks + m / q4nx::kBlockRows * layout.row_bytes(weight.columns);
  const std::int64_t row = m % q4nx::kBlockRows;
  const std::int64_t group = k / q4nx::kGroup;
  const auto parameter = [&](std::int64_t offset) {
    std::uint16_t bits = 0;
    std::memcpy(&bits, blocks + layout.scales_at(group) + offset + row * 2, 2);
    return from_bfloat16(bits);
  };
  const float scale = parameter(0);
  const float minimum = layout.has_minima ? parameter(layout.minimum_offset())
                                          : layout.minimum_of_symmetric() * scale;
  const int code = q4nx::code_value(blocks, layout, group, row, k % q4nx::kGroup);
  return minimum + scale * static_cast<float>(code);
}

DenseWeight of_q4nx(const Node& product) {
  const transformer::Q4NXWeight weight = transformer::read_q4nx_weight(product);
  if (weight.gated) fail(to_string(product), ": expected no gating");
  DenseWeight found{.inner = weight.columns, .columns = weight.rows};
  found.read_row = [owner = product.inputs[1].owner, weight](std::int64_t k, std::span<float> row) {
    for (std::size_t n = 0; n < row.size(); ++n)
      row[n] = value_at(weight, static_cast<std::int64_t>(n), k);
  };
  return found;
}

}  // namespace

DenseWeight read_dense_weight(const Node& product) {
  return transformer::is_dense_product(product) ? of_dense(product) : of_q4nx(product);
}

DenseWeight read_patch_weight(const Node& convolution) {
  const Value* weight = convolution.input(1);
  if (!is_constant(weight, DataType::kFloat32, 4))
    fail(to_string(convolution), ": expected a weight that is an initializer, float [D, C, p, p]");
  const Shape shape = shape_of(weight);
  DenseWeight found{.inner = shape[1] * shape[2] * shape[3], .columns = shape[0]};
  found.read_row = [owner = weight->owner, data = data_of<float>(*weight), inner = found.inner](
                       std::int64_t k, std::span<float> row) {
    for (std::size_t n = 0; n < row.size(); ++n)
      row[n] = data[static_cast<std::int64_t>(n) * inner + k];
  };
  return found;
}

// panels(K, N): [N/32][K/8][4][8 of K][8 of N].
void write_panel_row(std::span<const float> row, std::int64_t k, std::int64_t rows,
                     std::span<std::byte> panels) {
  constexpr std::int64_t kSide = 8;
  constexpr std::int64_t kPanelColumns = 32;
  for (std::int64_t n = 0; n < static_cast<std::int64_t>(row.size()); ++n) {
    const std::int64_t slab = (n / kPanelColumns * rows + k / kSide * kSide) * kPanelColumns;
    const std::int64_t sub_tile = n % kPanelColumns / kSide * kSide * kSide;
    const std::int64_t place = slab + sub_tile + k % kSide * kSide + n % kSide;
    const std::uint16_t bits = to_bfloat16(row[static_cast<std::size_t>(n)]);
    std::memcpy(panels.data() + static_cast<std::size_t>(place) * kBFloat16Bytes, &bits,
                kBFloat16Bytes);
  }
}

void write_panels(const DenseWeight& weight, std::int64_t rows, std::span<std::byte> panels) {
  std::memset(panels.data(), 0, panels.size());
  std::vector<float> row(static_cast<std::size_t>(weight.columns));
  for (std::int64_t k = 0; k < weight.inner; ++k) {
    weight.read_row(k, row);
    write_panel_row(row, k, rows, panels);
  }
}

const float* float_constant(const Node& node, std::size_t input, const Shape& shape) {
  const Value* value = node.input(input);
  if (value == nullptr || value->constant == nullptr || value->type != DataType::kFloat32 ||
      !value->shape || !(shape_of(value) == shape)) {
    fail(to_string(node), ": expected input ", input, " to be an initializer, float ",
         to_string(shape));
  }
  return data_of<float>(*value);
}

}  // namespace flownpu::npu
