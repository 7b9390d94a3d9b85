// SPDX-License-Identifier: Apache-2.0
#include "ops/transformer/paged.h"

#include <array>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <limits>
#include <utility>

#include "ops/error.h"
#include "ops/nodes/flow_qkv_attention.h"
#include "ops/nodes/paged_attention.h"
#include "ops/transformer/graph/operators.h"

namespace flownpu::transformer {
namespace {

constexpr std::size_t kTable = std::size(kAttentionPorts);  // behind FlowQKVAttention's inputs

constexpr std::array<std::pair<PagedInput, std::size_t>, 10> kPlaces{{
    {kPagedQuery, kQuery},
    {kKeyCache, kPastKey},
    {kValueCache, kPastValue},
    {kCumulativeSequenceLengths, kTotalSequenceLength},
    {kPastSequenceLengths, kSeqlensK},
    {kBlockTable, kTable},
    {kPagedCosCache, kCosCache},
    {kPagedSinCache, kSinCache},
    {kPagedQNormWeight, kQNormWeight},
    {kPagedKNormWeight, kKNormWeight},
}};

bool is_constant(const Value& value, DataType type, std::int64_t least, std::int64_t most) {
  if (value.constant == nullptr || value.type != type || !value.shape ||
      value.shape->elements() != 1)
    return false;
  const std::int64_t found = type == DataType::kInt32
                                 ? *static_cast<const std::int32_t*>(value.constant)
                                 : *static_cast<const std::int64_t*>(value.constant);
  return least <= found && found <= most;
}

}  // namespace

std::vector<Node> with_flow_attention(std::vector<Node> nodes) {
  for (Node& node : nodes) {
    if (!is_paged_attention(node)) continue;
    std::vector<Value> inputs(kTable + 1);
    for (const auto& [from, to] : kPlaces)
      if (const Value* value = node.input(from)) inputs[to] = *value;
    node.inputs = std::move(inputs);
    node.op_type = "FlowQKVAttention";
  }
  return nodes;
}

const Value* block_table(const Node& attention) {
  return is_attention(attention) ? attention.input(kTable) : nullptr;
}

void check_last_tokens(const GraphWalk& graph, const Node& selection, std::string_view boundaries) {
  constexpr std::int64_t kAll = std::numeric_limits<std::int32_t>::max();
  const Node* difference = graph.producer(selection.inputs[1].name);
  const bool is_difference = difference != nullptr && is(*difference, "", "Sub") &&
                             is_constant(difference->inputs[1], DataType::kInt32, 1, 1);
  const Node* ends = is_difference ? graph.producer(difference->inputs[0].name) : nullptr;
  if (selection.integer("axis", 0) == 0 && ends != nullptr && is(*ends, "", "Slice") &&
      ends->inputs.size() == 3 && ends->inputs[0].name == boundaries &&
      is_constant(ends->inputs[1], DataType::kInt64, 1, 1) &&
      is_constant(ends->inputs[2], DataType::kInt64, kAll,
                  std::numeric_limits<std::int64_t>::max()))
    return;
  fail(to_string(selection),
       ": expected it to select each sequence's last token, cumulative_sequence_lengths[1:] - 1");
}

}  // namespace flownpu::transformer
