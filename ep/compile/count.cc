// SPDX-License-Identifier: Apache-2.0
#include "ep/compile/count.h"

#include <algorithm>
#include <limits>
#include <optional>

namespace flownpu {
namespace {

// How often a run of the If, Loop or Scan runs its body.
std::int64_t iterations(const Node& node) {
  // Exporters write the largest int64 for a loop that its condition alone ends.
  constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();
  if (node.op_type == "Loop") {
    const Value* count = node.input(0);
    if (count == nullptr || count->constant == nullptr) return 1;
    const auto times = *static_cast<const std::int64_t*>(count->constant);
    return times >= 0 && times <= kMost ? times : 1;
  }
  constexpr int kWithoutBatches = 9;  // the opset from which on Scan has no axis of batches
  if (node.op_type == "Scan" && node.since_version >= kWithoutBatches && !node.inputs.empty()) {
    // The last inputs are scanned, all over as many slices.
    const std::optional<Shape>& scanned = node.inputs.back().shape;
    if (!scanned) return 1;
    const std::vector<std::int64_t> axes = node.integers("scan_input_axes");
    const int axis = axes.empty() ? 0 : static_cast<int>(axes.back());
    if (axis >= -scanned->rank() && axis < scanned->rank())
      return std::max<std::int64_t>(1, (*scanned)[axis < 0 ? axis + scanned->rank() : axis]);
  }
  return 1;
}

}  // namespace

Placement count_nodes(const std::vector<GraphNode>& nodes, const Partitions& partitions) {
  Placement placement;
  placement.nodes = nodes.size() - partitions.elsewhere;
  placement.elsewhere = partitions.elsewhere;
  placement.partitions = partitions.taken.size();
  placement.multiply_adds_known = std::ranges::all_of(
      nodes, [](const GraphNode& node) { return product_of(node.node).is_known; });
  for (const auto& [index, reason] : partitions.rejected) {
    const Node& node = nodes[index].node;
    if (nodes[index].is_control_flow) {
      --placement.nodes;
      placement.control_flow.push_back(
          {to_string(node), node.op_type, "ONNX Runtime runs it around the nodes of its bodies"});
    } else {
      placement.left.push_back({to_string(node), node.op_type, reason});
      count_left(node, placement);
    }
  }
  return placement;
}

void count_left(const Node& node, Placement& placement) {
  const Product product = product_of(node);
  placement.left_multiply_adds += product.multiply_adds * product.rows;
}

std::vector<std::int64_t> runs_of_bodies(const std::vector<GraphNode>& nodes) {
  std::vector<const GraphNode*> owners;
  for (const GraphNode& node : nodes) {
    if (node.bodies > 0) owners.push_back(&node);
  }
  std::ranges::sort(owners, {}, &GraphNode::number);
  std::vector<std::int64_t> runs;
  for (const GraphNode* owner : owners)
    runs.insert(runs.end(), owner->bodies, iterations(owner->node));
  return runs;
}

}  // namespace flownpu
