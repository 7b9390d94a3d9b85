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

std::string reason_against(const Device& device, const GraphNode& node, const Producer& producer) {
  if (!node.unsupported.empty()) return node.unsupported;
  try {
    if (is_context(node.node)) return "";
    return device.unsupported(node.node, producer);
  } catch (const Error& error) {  // The attribute has the wrong type, for example.
    return error.what();
  }
}

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

// A node's level is the largest number of times that any path to it leaves the taken nodes and
// returns to them. The taken nodes of one level form a partition. It is convex: levels never fall
// along a path, and a path that goes from one of its nodes through a rejected node to a taken one
// reaches a higher level.
Partitions partition(const Device& device, const std::vector<GraphNode>& nodes) {
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
    const std::string reason = node.is_elsewhere ? "" : reason_against(device, node, producer);
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

std::int64_t estimate_multiply_adds(const Node& node) {
  const auto product = [&node](std::string_view first, std::string_view second) {
    return node.integer(first, 0) * node.integer(second, 0);
  };
  try {
    if (node.op_type == "MatMulNBits") return product("K", "N");
    if (node.op_type == "Q4NXMatMul" || node.op_type == "FusedDQP") {
      return product("K", "M") * (node.text("gating", "none") == "none" ? 1 : 2);
    }
    static constexpr std::array<std::string_view, 3> kProducts{"MatMul", "Gemm", "FusedMatMul"};
    const Value* weight = node.input(1);
    if (std::ranges::find(kProducts, node.op_type) != kProducts.end() && weight != nullptr &&
        weight->constant != nullptr && weight->shape && weight->shape->rank() == 2) {
      return weight->shape->elements();
    }
  } catch (const Error&) {
    return 0;  // the node was rejected for its attributes
  }
  return 0;
}

}  // namespace flownpu
