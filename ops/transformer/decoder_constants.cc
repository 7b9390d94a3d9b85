// SPDX-License-Identifier: Apache-2.0
#include "ops/transformer/decoder_constants.h"

#include <optional>

#include "ops/error.h"
#include "ops/transformer/decoder.h"

namespace flownpu::transformer {

Q4NXWeight read_q4nx_weight(const Node& product) {
  Q4NXWeight weight;
  weight.rows = product.required_integer("M");
  weight.columns = product.required_integer("K");
  weight.gated = product.text("gating", "none") != "none";
  const auto shape_in = [&](const q4nx::Layout& layout) {
    return q4nx::blocks_shape(weight.row_blocks() * q4nx::kBlockRows, weight.columns, layout);
  };
  const Value* value = product.input(1);
  if (value != nullptr && value->constant != nullptr && value->type == DataType::kUInt8 &&
      value->shape) {
    const std::optional<q4nx::Layout> layout = q4nx::layout_of(*value->shape);
    if (layout && *value->shape == shape_in(*layout)) {
      weight.blocks = static_cast<const std::byte*>(value->constant);
      weight.layout = *layout;
      return weight;
    }
  }
  fail(to_string(product), ": expected W to be an initializer, uint8 ",
       to_string(shape_in(q4nx::kWide)), ", ", to_string(shape_in(q4nx::kNarrow)), " or ",
       to_string(shape_in(q4nx::kSymmetric)));
}

const float* read_vector(const Node& node, std::size_t input, std::int64_t size) {
  const Value* weight = node.input(input);
  if (weight == nullptr || weight->constant == nullptr || weight->type != DataType::kFloat32 ||
      !weight->shape || !(*weight->shape == Shape{size})) {
    fail(to_string(node), ": expected a weight that is an initializer, float [", size, "]");
  }
  return static_cast<const float*>(weight->constant);
}

TableSize size_of_table(const Value* table) {
  if (table == nullptr || table->constant == nullptr || table->type != DataType::kFloat32 ||
      !table->shape || table->shape->rank() != 2)
    return {};
  return {(*table->shape)[0], (*table->shape)[1]};
}

TableSize size_of_given_table(const Value& table, std::int64_t half) {
  if (table.type != DataType::kFloat32) return {};
  const bool known = table.shape && table.shape->rank() == 2 && (*table.shape)[1] > 0;
  return {kMostPositions, known ? (*table.shape)[1] : half};
}

}  // namespace flownpu::transformer
