// SPDX-License-Identifier: Apache-2.0
#include "ep/compile/worth.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <string_view>
#include <unordered_map>

namespace flownpu {
namespace {

// A run of a partition costs some 10 us beside its nodes (its inputs and outputs, waking threads,
// and what ONNX Runtime no longer fuses with its neighbours). Products with weights are what this
// device computes faster: a million multiply-adds in about 10 us less than ONNX Runtime in f32 on
// two cores with AVX-512. Element-wise nodes, norms and moves take as long as there.
constexpr std::int64_t kLeastMultiplyAdds = 1'000'000;
// Rows that a product is taken to have where the graph does not say: a short text.
constexpr std::int64_t kUnknownRows = 16;

// Operators whose time is not in their constant weights: attention, mixtures of experts.
bool is_large(const Node& node) {
  static constexpr std::array<std::string_view, 7> kLarge{
      "Attention", "GroupQueryAttention", "MultiHeadAttention", "PagedAttention", "MoE",
      "QMoE",      "MatMulNBits"};
  return node.domain == kDomain || std::ranges::find(kLarge, node.op_type) != kLarge.end();
}

std::int64_t work_of(const Node& node) {
  // Convolutions are computed in f32, no faster than in ONNX Runtime.
  if (node.op_type == "Conv") return 0;
  const Product product = product_of(node);
  const bool has_rows = product.rows > 1;
  return product.multiply_adds * (has_rows ? product.rows : kUnknownRows);
}

}  // namespace

std::vector<std::string> left_patterns(const Device& device, const std::vector<GraphNode>& nodes) {
  constexpr std::string_view kDequantize = "DequantizeLinear";
  std::vector<std::string> reasons(nodes.size());
  std::unordered_map<std::string_view, std::size_t> dequantized;
  for (std::size_t index = 0; index < nodes.size(); ++index) {
    const Node& node = nodes[index].node;
    if (node.op_type != kDequantize || node.inputs.empty() || node.outputs.empty()) continue;
    dequantized.emplace(node.outputs[0].name, index);
    if (node.inputs[0].constant == nullptr) {
      reasons[index] = "ONNX Runtime fuses quantised activations with the node that reads them";
    } else {
      reasons[index] = reason_against(device, nodes[index], [](auto) { return nullptr; });
    }
  }
  const auto source_of = [&](const Value& input) {
    const auto found = dequantized.find(input.name);
    return found == dequantized.end() ? nullptr : &found->second;
  };
  for (std::size_t index = 0; index < nodes.size(); ++index) {
    for (const Value& input : nodes[index].node.inputs) {
      const std::size_t* source = source_of(input);
      if (source == nullptr || reasons[*source].empty() || !reasons[index].empty()) continue;
      reasons[index] = "it reads a DequantizeLinear that is left to ONNX Runtime, which fuses both";
    }
  }
  for (std::size_t index = 0; index < nodes.size(); ++index) {
    if (reasons[index].empty()) continue;
    for (const Value& input : nodes[index].node.inputs) {
      const std::size_t* source = source_of(input);
      if (source != nullptr && reasons[*source].empty())
        reasons[*source] = "its reader is left to ONNX Runtime, which fuses both";
    }
  }
  return reasons;
}

void leave_small(const std::vector<GraphNode>& nodes, Partitions& partitions) {
  std::erase_if(partitions.taken, [&](const std::vector<std::size_t>& partition) {
    std::int64_t work = 0;
    for (const std::size_t index : partition) {
      if (is_large(nodes[index].node)) return false;
      work += work_of(nodes[index].node);
    }
    if (work >= kLeastMultiplyAdds) return false;
    for (const std::size_t index : partition)
      partitions.rejected.push_back(
          {index, "too little work between nodes that ONNX Runtime runs (claim=all takes it)"});
    return true;
  });
  std::ranges::sort(partitions.rejected, {}, &Partitions::Rejected::node);
}

}  // namespace flownpu
