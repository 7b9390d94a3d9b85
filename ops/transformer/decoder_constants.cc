// SPDX-License-Identifier: Apache-2.0
#include "ops/transformer/decoder_constants.h"

#include <optional>
#include <string>

#include "ops/error.h"
#include "ops/nodes/q4nx_moe.h"
#include "ops/transformer/decoder.h"

namespace flownpu::transformer {

namespace {

// Reads the blocks of `count` weights of the same size; returns the first.
Q4NXWeight read_blocks(const Node& product, std::size_t input, Q4NXWeight weight,
                       std::int64_t count) {
  const auto shape_in = [&](const q4nx::Layout& layout) {
    return q4nx::blocks_shape(count * weight.row_blocks() * q4nx::kBlockRows, weight.columns,
                              layout);
  };
  const Value* value = product.input(input);
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

}  // namespace

Q4NXWeight read_q4nx_weight(const Node& product) {
  return read_blocks(product, 1,
                     {.layout = {},
                      .rows = product.required_integer("M"),
                      .columns = product.required_integer("K"),
                      .gated = product.text("gating", "none") != "none"},
                     1);
}

std::pair<Q4NXWeight, Q4NXWeight> read_first_expert(const Node& mixture) {
  const std::int64_t hidden = mixture.required_integer("hidden_size");
  const std::int64_t inner = mixture.required_integer("expert_size");
  const std::int64_t count = mixture.required_integer("num_experts");
  return {read_blocks(mixture, kMoeGateUp,
                      {.layout = {}, .rows = inner, .columns = hidden, .gated = true}, count),
          read_blocks(mixture, kMoeDown, {.layout = {}, .rows = hidden, .columns = inner}, count)};
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
