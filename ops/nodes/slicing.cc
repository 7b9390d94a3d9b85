// SPDX-License-Identifier: Apache-2.0
#include "ops/nodes/slicing.h"

#include <algorithm>
#include <utility>

namespace flownpu {
namespace {

int rank_of(const Value& value) { return value.shape ? value.shape->rank() : 0; }

std::vector<std::size_t> named_outputs(const Node& node) {
  std::vector<std::size_t> outputs;
  for (std::size_t i = 0; i < node.outputs.size(); ++i) {
    if (node.has_output(i)) outputs.push_back(i);
  }
  return outputs;
}

}  // namespace

std::optional<Slicing> slice_rows(const Node& node, std::vector<std::size_t> inputs, int row_axes) {
  for (const std::size_t i : inputs) {
    const Value* value = node.input(i);
    if (value != nullptr && rank_of(*value) < 2 + row_axes) return std::nullopt;
  }
  return Slicing{.inputs = std::move(inputs), .outputs = named_outputs(node)};
}

std::optional<Slicing> slice_elements(const Node& node) {
  Slicing slicing{.inputs = {}, .outputs = named_outputs(node)};
  int rank = 0;
  for (const Value& input : node.inputs) {
    if (!input.shape) return std::nullopt;
    rank = std::max(rank, rank_of(input));
  }
  if (rank < 2) return std::nullopt;
  for (std::size_t i = 0; i < node.inputs.size(); ++i) {
    const Value& input = node.inputs[i];
    const Shape shape = input.shape.value_or(Shape());
    // The input's axis that corresponds to axis 1 of the output: broadcasting aligns shapes at
    // their ends.
    const int axis = shape.rank() - (rank - 1);
    if (axis < 0 || shape[axis] == 1) continue;
    if (axis != 1 || input.constant != nullptr) return std::nullopt;
    slicing.inputs.push_back(i);
  }
  return slicing;
}

std::int64_t next_slice(std::int64_t left, std::int64_t at_once) {
  return at_once <= 0 || left < at_once + at_once / 4 ? left : at_once;
}

std::int64_t after_blocks(const Tensor& blocks, std::int64_t end) {
  if (blocks.shape.rank() != 2 || blocks.type != DataType::kInt32) return end;
  const std::int64_t tokens = blocks.shape[1];
  const auto* numbers = blocks.as<const std::int32_t>();
  const auto is_cut = [&] {
    for (std::int64_t row = 0; row < blocks.shape[0]; ++row) {
      const std::int32_t* last = numbers + row * tokens + end - 1;
      if (last[0] > 0 && last[0] == last[1]) return true;
    }
    return false;
  };
  while (end > 0 && end < tokens && is_cut()) ++end;
  return end;
}

}  // namespace flownpu
