// SPDX-License-Identifier: Apache-2.0
#include "ep/compile/capability.h"

#include <algorithm>
#include <array>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "ep/context/compiled_model.h"

namespace flownpu {
namespace {

constexpr int kNotTaken = -1;

// Moves taken nodes that only read constants, such as a Cast of a weight, to the partition that
// reads them first, since the device may fuse them with their reader. They keep level 0 if a node
// that was not taken reads them. Levels still never decrease along a path from such a node.
void join_readers(const std::vector<GraphNode>& nodes, std::vector<int>& levels) {
  std::unordered_map<std::string_view, std::size_t> sources;
  std::unordered_map<std::size_t, int> lowest;
  for (std::size_t index = 0; index < nodes.size(); ++index) {
    const auto read = [&](std::string_view value, int level) {
      const auto source = sources.find(value);
      if (source == sources.end()) return;
      const auto [entry, is_first] = lowest.try_emplace(source->second, level);
      if (!is_first) entry->second = std::min(entry->second, level);
    };
    const GraphNode& node = nodes[index];
    for (const Value& input : node.node.inputs) read(input.name, std::max(levels[index], 0));
    for (const std::string& input : node.implicit_inputs) read(input, 0);
    const auto is_constant = [](const Value& v) { return v.name.empty() || v.constant != nullptr; };
    if (levels[index] != 0 || !std::ranges::all_of(node.node.inputs, is_constant)) continue;
    for (const Value& output : node.node.outputs) {
      if (!output.name.empty()) sources.emplace(output.name, index);
    }
  }
  for (const auto& [source, level] : lowest) levels[source] = level;
}

}  // namespace

std::string reason_against(const Device& device, const GraphNode& node, const Producer& producer) {
  if (!node.unsupported.empty()) return node.unsupported;
  try {
    if (is_context(node.node)) return "";
    return device.unsupported(node.node, producer);
  } catch (const Error& error) {  // An attribute of the wrong type, say.
    return error.what();
  }
}

// A node's level is the largest number of times that any path to it leaves the taken nodes and
// returns to them. The taken nodes of one level form a partition. It is convex: levels never fall
// along a path, and a path that goes from one of its nodes through a rejected node to a taken one
// reaches a higher level.
Partitions partition(const Device& device, const std::vector<GraphNode>& nodes,
                     const std::vector<std::string>& left) {
  struct ProducedValue {
    int level;
    bool taken;
    const Node* node;
  };
  std::unordered_map<std::string_view, ProducedValue> produced;
  const Producer producer = [&](std::string_view value) {
    const auto found = produced.find(value);
    return found == produced.end() || !found->second.taken ? nullptr : found->second.node;
  };
  Partitions result;
  std::vector<int> levels(nodes.size(), kNotTaken);
  for (std::size_t index = 0; index < nodes.size(); ++index) {
    const GraphNode& node = nodes[index];
    std::string reason = left.empty() ? "" : left[index];
    if (reason.empty() && !node.is_elsewhere) reason = reason_against(device, node, producer);
    const bool taken = reason.empty() && !node.is_elsewhere;

    // kNotTaken: no taken node comes before it.
    int level = taken ? 0 : kNotTaken;
    const auto follow = [&](std::string_view value) {
      const auto found = produced.find(value);
      if (found == produced.end()) return;
      const int step = taken && !found->second.taken ? 1 : 0;
      level = std::max(level, found->second.level + step);
    };
    for (const Value& input : node.node.inputs) follow(input.name);
    for (const std::string& input : node.implicit_inputs) follow(input);
    for (const Value& output : node.node.outputs) {
      if (!output.name.empty())
        produced.emplace(output.name, ProducedValue{level, taken, &node.node});
    }

    if (taken) {
      levels[index] = level;
    } else if (node.is_elsewhere) {
      ++result.elsewhere;
    } else {
      result.rejected.push_back({index, reason});
    }
  }
  join_readers(nodes, levels);
  for (std::size_t index = 0; index < nodes.size(); ++index) {
    if (levels[index] == kNotTaken) continue;
    const auto slot = static_cast<std::size_t>(levels[index]);
    if (result.taken.size() <= slot) result.taken.resize(slot + 1);
    result.taken[slot].push_back(index);
  }
  std::erase_if(result.taken, [](const auto& partition) { return partition.empty(); });
  return result;
}

namespace {

// The product of the sizes that are known, those of axes [first, last).
std::int64_t known_elements(const Value& value, int first, int last) {
  std::int64_t elements = 1;
  for (int axis = first; value.shape && axis < last; ++axis) {
    if ((*value.shape)[axis] > 0) elements *= (*value.shape)[axis];
  }
  return elements;
}

// For each image [N, C, ..] the weight [M, C / group, ..] multiplies the pixels of one channel of
// the output, or, where it is transposed, of the input.
Product convolution(const Node& node) {
  const Value& images = node.op_type == "ConvTranspose" ? node.inputs[0] : node.outputs[0];
  const Value* weight = node.input(1);
  if (!images.shape || weight == nullptr || !weight->shape) return {.is_known = false};
  const Shape& shape = *images.shape;
  const bool is_known =
      std::all_of(shape.begin() + 2, shape.end(), [](auto size) { return size >= 0; });
  return {.multiply_adds = weight->shape->elements(),
          .rows = known_elements(images, 0, 1) * known_elements(images, 2, shape.rank()),
          .has_rows = is_known && shape[0] >= 0,
          .is_known = is_known};
}

}  // namespace

Product product_of(const Node& node) {
  const auto sizes = [&node](std::string_view first, std::string_view second) {
    return node.integer(first, 0) * node.integer(second, 0);
  };
  const Value* x = node.input(0);
  const bool has_shape = x != nullptr && x->shape && x->shape->rank() > 0;
  const std::int64_t rows = has_shape ? known_elements(*x, 0, x->shape->rank() - 1) : 1;
  const bool has_rows = has_shape && std::all_of(x->shape->begin(), x->shape->end() - 1,
                                                 [](auto size) { return size > 0; });
  try {
    if (node.op_type == "Conv" || node.op_type == "FusedConv" || node.op_type == "ConvTranspose")
      return convolution(node);
    if (node.op_type == "MatMulNBits") return {sizes("K", "N"), rows, has_rows};
    if (node.op_type == "Q4NXMatMul" || node.op_type == "FusedDQP")
      return {sizes("K", "M") * (node.text("gating", "none") == "none" ? 1 : 2), rows, has_rows};
    static constexpr std::array<std::string_view, 6> kProducts{
        "MatMul", "Gemm", "FusedMatMul", "DenseMatMul", "MatMulInteger", "DynamicQuantizeMatMul"};
    const Value* weight = node.input(1);
    // A quantised weight is the result of a DequantizeLinear.
    if (std::ranges::find(kProducts, node.op_type) != kProducts.end() && weight != nullptr &&
        weight->shape && weight->shape->rank() == 2 && weight->shape->elements() > 0) {
      return {weight->shape->elements(), rows, has_rows};
    }
  } catch (const Error&) {
    return {};  // the node was rejected for its attributes
  }
  return {};
}

}  // namespace flownpu
