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

std::int64_t work_of(const Node& node, std::int64_t unknown_rows) {
  const Product product = product_of(node);
  const bool has_rows = product.has_rows || product.rows > 1;
  return product.multiply_adds * (has_rows ? product.rows : unknown_rows);
}

// Convolutions of so many channels, in bf16, take 0.6 to 0.95 of ONNX Runtime's time in f32 (one
// thread of a Zen 4 core; 32 channels 1.05, 16 channels 1.5).
constexpr std::int64_t kLeastChannels = 64;
// Up to so many channels are those of a picture or of what it was encoded to.
constexpr std::int64_t kPictureChannels = 4;

bool is_convolution(const Node& node) {
  return node.op_type == "Conv" || node.op_type == "FusedConv";
}

// Whether convolutions pay: ONNX Runtime keeps images in a layout of its own between them, so that
// either all are taken or none. Depthwise ones and those of a few channels are faster there; a
// graph may have some that read or write a picture, which take little of its time. `rounds`:
// whether products in bf16 are faster than in f32.
bool convolutions_pay(const std::vector<GraphNode>& nodes, bool rounds) {
  return std::ranges::all_of(nodes, [rounds](const GraphNode& graph_node) {
    const Node& node = graph_node.node;
    const Value* weight = node.input(1);
    if (!is_convolution(node)) return true;
    if (weight == nullptr || !weight->shape || weight->shape->rank() < 3) return false;
    if (node.integer("group", 1) != 1) return false;
    const std::int64_t outputs = (*weight->shape)[0];
    const std::int64_t inputs = (*weight->shape)[1];
    const bool is_wide = std::min(inputs, outputs) >= kLeastChannels;
    return inputs <= kPictureChannels || (rounds && (is_wide || outputs <= kPictureChannels));
  });
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
    // A convolution whose weight alone is quantised multiplies floats, there as here.
    const GraphNode* images = maker(node.inputs[0]);
    const bool reads_codes =
        node.op_type == "ConvInteger" ||
        (images != nullptr && is_one_of(images->node, {kDequantize, kDynamic}));
    if (reads_codes && is_one_of(node, {"Conv", "ConvTranspose", "ConvInteger"})) {
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

std::vector<std::string> left_nodes(const Device& device, const std::vector<GraphNode>& nodes,
                                    std::string_view cpu_isa) {
  std::vector<std::string> reasons = QuantizedPatterns(device, nodes).take();
  const bool rounds = cpu::select_kernels(cpu_isa).dense_rounding(false, DataType::kFloat32).type ==
                      cpu::DenseType::kBFloat16;
  if (convolutions_pay(nodes, rounds)) return reasons;
  for (std::size_t index = 0; index < nodes.size(); ++index) {
    if (reasons[index].empty() && is_convolution(nodes[index].node))
      reasons[index] = "ONNX Runtime's convolutions are faster (claim=all takes them)";
  }
  return reasons;
}

void leave_small(const std::vector<GraphNode>& nodes, Partitions& partitions, bool is_body) {
  const std::int64_t unknown_rows = is_body ? kUnknownRowsOfBody : kUnknownRows;
  const bool is_whole = !is_body && partitions.rejected.empty() && partitions.elsewhere == 0;
  std::erase_if(partitions.taken, [&](const std::vector<std::size_t>& partition) {
    std::int64_t work = 0;
    for (const std::size_t index : partition) {
      if (is_large(nodes[index].node)) return false;
      work += work_of(nodes[index].node, unknown_rows);
    }
    if (work >= kLeastMultiplyAdds || (is_whole && work == 0)) return false;
    for (const std::size_t index : partition)
      partitions.rejected.push_back(
          {index, "too little work for another provider (claim=all takes it)"});
    return true;
  });
  std::ranges::sort(partitions.rejected, {}, &Partitions::Rejected::node);
}

}  // namespace flownpu
