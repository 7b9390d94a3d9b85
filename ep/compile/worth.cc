// SPDX-License-Identifier: Apache-2.0
#include "ep/compile/worth.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <initializer_list>
#include <string_view>
#include <unordered_map>

#include "ops/cpu/kernels.h"
#include "ops/lowering/lowering.h"

namespace flownpu {
namespace {

// A run of a partition costs some 10 us beside its nodes (its inputs and outputs, waking threads,
// and what ONNX Runtime no longer fuses with its neighbours). Products with weights are what this
// device computes faster: a million multiply-adds in about 10 us less than ONNX Runtime in f32 on
// two cores with AVX-512. Element-wise nodes, norms and moves take as long as there.
constexpr std::int64_t kLeastMultiplyAdds = 1'000'000;
// Rows that a product is taken to have where the graph does not say: a short text, or one step in a
// body, whose run an If may skip and a Loop repeats.
constexpr std::int64_t kUnknownRows = 16;
constexpr std::int64_t kUnknownRowsOfBody = 1;

// Operators whose time is not in their constant weights: attention, mixtures of experts.
bool is_large(const Node& node) {
  static constexpr std::array<std::string_view, 7> kLarge{
      "Attention", "GroupQueryAttention", "MultiHeadAttention", "PagedAttention", "MoE",
      "QMoE",      "MatMulNBits"};
  return node.domain == kDomain || std::ranges::find(kLarge, node.op_type) != kLarge.end();
}

// Convolutions of so many channels, in bf16, take 0.6 to 0.95 of ONNX Runtime's time in f32 (one
// thread of a Zen 4 core; 32 channels 1.05, 16 channels 1.5). Others cost twice what these save,
// for each multiply-add: 45 instead of 30 GMAC/s there, where 55 become 80 here.
constexpr std::int64_t kLeastChannels = 64;
// Convolutions with fewer results in a group are not computed as products.
constexpr std::int64_t kMostLines = 8;
constexpr std::int64_t kLossOfOthers = 2;

bool is_convolution(const Node& node) {
  return node.op_type == "Conv" || node.op_type == "FusedConv";
}

bool is_wide(const Node& node) {
  const Value* weight = node.input(1);
  if (weight == nullptr || !weight->shape || weight->shape->rank() < 3) return false;
  const std::int64_t groups = std::max<std::int64_t>(node.integer("group", 1), 1);
  return (*weight->shape)[1] >= kLeastChannels && (*weight->shape)[0] / groups > kMostLines;
}

// `rounds`: whether products in bf16 are faster than in f32.
std::int64_t work_of(const Node& node, std::int64_t unknown_rows, bool rounds) {
  const Product product = product_of(node);
  const bool has_rows = product.has_rows || product.rows > 1;
  const std::int64_t work = product.multiply_adds * (has_rows ? product.rows : unknown_rows);
  return !is_convolution(node) || (rounds && is_wide(node)) ? work : -kLossOfOthers * work;
}

constexpr std::string_view kDequantize = "DequantizeLinear";
constexpr std::string_view kQuantize = "QuantizeLinear";
constexpr std::string_view kDynamic = "DynamicQuantizeLinear";

// Whether lowering makes a MatMulInteger a product of int8; else it is computed one by one.
bool becomes_product(const Node& node) {
  const Value* weight = node.input(1);
  return weight != nullptr && weight->constant != nullptr && weight->type == DataType::kInt8 &&
         lowering::is_zero(node.input(3));
}

bool is_one_of(const Node& node, std::initializer_list<std::string_view> op_types) {
  return node.domain.empty() && std::ranges::find(op_types, node.op_type) != op_types.end();
}

// Which nodes of quantised patterns are left: a node that reads dequantised values and is not taken
// leaves its DequantizeLinears and QuantizeLinears, which leave others that share them.
class QuantizedPatterns {
 public:
  QuantizedPatterns(const Device& device, const std::vector<GraphNode>& nodes)
      : nodes_(nodes), reasons_(nodes.size()) {
    for (std::size_t index = 0; index < nodes.size(); ++index) {
      for (const Value& output : nodes[index].node.outputs)
        if (!output.name.empty()) makers_.emplace(output.name, index);
    }
    for (std::size_t index = 0; index < nodes.size(); ++index) judge(device, index);
    while (spread()) {
    }
  }

  std::vector<std::string> take() { return std::move(reasons_); }

 private:
  const GraphNode* maker(const Value& value) const {
    const auto found = makers_.find(value.name);
    return found == makers_.end() ? nullptr : &nodes_[found->second];
  }
  bool is_left(const GraphNode* node) const {
    return node != nullptr && !reasons_[static_cast<std::size_t>(node - nodes_.data())].empty();
  }

  // Whether the activations of a product are dequantised from uint8, for which ONNX Runtime has a
  // product of integers. It has none for those of int8, but on Arm.
  bool reads_dequantized_bytes(const Node& node) const {
    const GraphNode* source = maker(node.inputs[0]);
    if (source == nullptr || !is_one_of(source->node, {kDequantize})) return false;
    const Value& codes = source->node.inputs[0];
#if defined(__aarch64__)
    return codes.constant == nullptr;
#else
    return codes.constant == nullptr && codes.type == DataType::kUInt8;
#endif
  }

  void judge(const Device& device, std::size_t index) {
    const Node& node = nodes_[index].node;
    const bool is_pattern =
        is_one_of(node, {kDequantize, kQuantize, kDynamic, "MatMulInteger"}) ||
        std::ranges::any_of(node.inputs, [&](const Value& input) {
          const GraphNode* source = maker(input);
          return source != nullptr && is_one_of(source->node, {kDequantize, kDynamic});
        });
    if (!is_pattern) return;
    if (is_one_of(node, {"Conv", "ConvTranspose", "ConvInteger"})) {
      reasons_[index] = "ONNX Runtime's quantised convolutions are faster";
      return;
    }
    if (is_one_of(node, {"MatMul", "Gemm"}) && reads_dequantized_bytes(node)) {
      reasons_[index] = "ONNX Runtime multiplies uint8 activations as they are";
      return;
    }
    if (is_one_of(node, {"MatMulInteger"}) && !becomes_product(node)) {
      reasons_[index] = "its weight is not a constant of int8 with zero points of 0";
      return;
    }
    reasons_[index] = reason_against(device, nodes_[index], [&](std::string_view value) {
      const auto found = makers_.find(value);
      return found == makers_.end() ? nullptr : &nodes_[found->second].node;
    });
  }

  // One step; false if nothing changed.
  bool spread() {
    bool changed = false;
    const auto leave = [&](std::size_t index, const char* reason) {
      if (!reasons_[index].empty()) return;
      reasons_[index] = reason;
      changed = true;
    };
    for (std::size_t index = 0; index < nodes_.size(); ++index) {
      for (const Value& input : nodes_[index].node.inputs) {
        const GraphNode* source = maker(input);
        if (source == nullptr) continue;
        const auto at = static_cast<std::size_t>(source - nodes_.data());
        const bool quantises = is_one_of(nodes_[index].node, {kQuantize});
        if (!is_one_of(source->node, {kDequantize, kDynamic}) && !quantises) continue;
        if (is_left(source))
          leave(index, "it reads a node that is left to ONNX Runtime, which fuses both");
        if (is_left(&nodes_[index]))
          leave(at, "its reader is left to ONNX Runtime, which fuses both");
      }
    }
    return changed;
  }

  const std::vector<GraphNode>& nodes_;
  std::vector<std::string> reasons_;
  std::unordered_map<std::string_view, std::size_t> makers_;
};

}  // namespace

std::vector<std::string> left_patterns(const Device& device, const std::vector<GraphNode>& nodes) {
  return QuantizedPatterns(device, nodes).take();
}

void leave_small(const std::vector<GraphNode>& nodes, Partitions& partitions, bool is_body,
                 std::string_view cpu_isa) {
  const bool rounds = cpu::select_kernels(cpu_isa).dense_rounding(false, DataType::kFloat32).type ==
                      cpu::DenseType::kBFloat16;
  const std::int64_t unknown_rows = is_body ? kUnknownRowsOfBody : kUnknownRows;
  const bool is_whole = !is_body && partitions.rejected.empty() && partitions.elsewhere == 0;
  std::erase_if(partitions.taken, [&](const std::vector<std::size_t>& partition) {
    std::int64_t work = 0;
    for (const std::size_t index : partition) {
      if (is_large(nodes[index].node)) return false;
      work += work_of(nodes[index].node, unknown_rows, rounds);
    }
    if (work >= kLeastMultiplyAdds || (is_whole && work == 0)) return false;
    for (const std::size_t index : partition)
      partitions.rejected.push_back(
          {index, work < 0 ? "ONNX Runtime's convolutions are faster (claim=all takes it)"
                           : "too little work for another provider (claim=all takes it)"});
    return true;
  });
  std::ranges::sort(partitions.rejected, {}, &Partitions::Rejected::node);
}

}  // namespace flownpu
