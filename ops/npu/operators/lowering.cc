// SPDX-License-Identifier: Apache-2.0
#include "ops/npu/operators/lowering.h"

#include <algorithm>
#include <map>
#include <sstream>
#include <string_view>
#include <utility>
#include <vector>

#include "ops/error.h"
#include "ops/npu/match/array_operator.h"
#include "ops/npu/match/convolution.h"
#include "ops/npu/match/layers.h"
#include "ops/npu/operators/programs.h"
#include "ops/transformer/graph/operators.h"

namespace flownpu::npu {
namespace {

using Counts = std::map<std::string, int, std::less<>>;

std::string listed(const Counts& counts) {
  std::string text;
  for (const auto& [op_type, count] : counts) {
    text += (text.empty() ? "" : ", ") + op_type;
    if (count > 1) text += " (" + std::to_string(count) + ")";
  }
  return text;
}

// Whether some run of a product is of one row with a Q4NX weight.
bool takes_one_row(const ArrayOperator& found, const std::vector<const ProgramRecord*>& records) {
  const ProgramRecord& least = *records.front();
  return least.tokens == 1 && least.context == 0 && found.rows <= 1;
}

// Whether a run may be worth its dispatches. The run has the size of the graph's shapes, or else
// the largest that a program computes at once.
bool may_be_worth(const ArrayOperator& found,
                  const std::vector<std::vector<const ProgramRecord*>>& programs,
                  const Threshold& threshold) {
  for (const auto& records : programs) {
    if (records.empty()) continue;
    if (takes_one_row(found, records) && found.multiply_adds >= threshold.one_row) return true;
    const ProgramRecord& most = *records.back();
    const std::int64_t keys = std::max<std::int64_t>(most.context, 1);
    const std::int64_t rows = found.rows > 0 ? found.rows : most.tokens * keys;
    // For attention, `rows` are queries times keys, so a division by `tokens` does not give runs.
    std::int64_t runs = 1;
    if (found.rows > 0 && most.context == 0) runs = (found.rows + most.tokens - 1) / most.tokens;
    const auto dispatches = runs * static_cast<std::int64_t>(most.array_dispatches());
    if (rows * found.multiply_adds / dispatches >= threshold.rows) return true;
  }
  return false;
}

// Records why a node stays on the host. An existing reason is replaced only if `better` is set and
// there are no layers. Dense products beside layers need no reason, and convolutions none but those
// that they have: a graph may have them without any part for the array.
void leave(Lowered& lowered, const Node& node, const std::string& reason, bool better) {
  const bool has_layers = std::ranges::any_of(lowered.nodes, is_layers);
  if (has_layers && transformer::is_dense_product(node)) return;
  const auto known = std::ranges::find(lowered.on_host, node.name, &Lowered::OnHost::node);
  const bool is_new = known == lowered.on_host.end();
  if (is_new && is_convolution(node)) return;
  if (is_new)
    lowered.on_host.push_back({node.name, node.op_type, reason});
  else if (better && !has_layers)
    known->reason = reason;
}

class OperatorLowering {
 public:
  OperatorLowering(Lowered& lowered, const Artifacts& artifacts, const Threshold& threshold)
      : lowered_(lowered), artifacts_(artifacts), threshold_(threshold) {
    // Layers have an array of their own, to which single rows would change and back.
    if (std::ranges::any_of(lowered.nodes, is_layers)) threshold_.one_row = threshold.rows;
  }

  void run() {
    for (Node& node : lowered_.nodes) {
      if (is_operator_on_array(node)) ++on_array_[node.op_type];
      if (!is_operator(node)) continue;
      try {
        place(node, describe_operator(node));
      } catch (const Error& error) {
        leave_with(node, error.what(), true);
      }
    }
    const std::string of_one = threshold_.one_row == threshold_.rows
                                   ? ""
                                   : " (of one row " + std::to_string(threshold_.one_row) + ")";
    const std::string least =
        std::to_string(threshold_.rows) + of_one + " multiply-adds a dispatch";
    if (!on_array_.empty()) {
      summarise("by themselves on the array: " + listed(on_array_) + " (runs below " + least +
                ": the host is faster)");
    }
    if (!convolutions_.empty()) summarise(listed(convolutions_) + " on the host: " + reason_);
    if (!below_.empty()) summarise(listed(below_) + " below " + least + ": the host is faster");
  }

 private:
  void summarise(const std::string& text) {
    lowered_.summary += (lowered_.summary.empty() ? "" : "; ") + text;
  }

  void place(Node& node, const ArrayOperator& found) {
    std::vector<std::vector<const ProgramRecord*>> programs;
    bool any = false;
    for (const Node& sizes : found.sizes) {
      programs.push_back(artifacts_.programs(sizes.op_type, sizes));
      any = any || !programs.back().empty();
    }
    if (!any) {
      // Too small, whatever was built.
      const std::int64_t least = found.rows == 1 ? threshold_.one_row : threshold_.rows;
      if (found.rows > 0 && found.rows * found.multiply_adds < least) return keep(node, below_);
      const Node& sizes = found.sizes.front();
      try {
        artifacts_.require(sizes.op_type, sizes);
      } catch (const DeviceError& error) {
        leave_with(node, error.what(), artifacts_.has(sizes.op_type));
      }
      return;
    }
    if (!may_be_worth(found, programs, threshold_)) return keep(node, below_);
    keep(node, on_array_);
    node = operator_on_array(std::move(node));
    node.attributes[kLeastOfOneRow] = threshold_.one_row;
  }

  // The summary has the first convolution's reason.
  void leave_with(const Node& node, const std::string& reason, bool better) {
    leave(lowered_, node, reason, better);
    if (!is_convolution(node)) return;
    if (convolutions_.empty()) reason_ = reason;
    ++convolutions_[node.op_type];
  }

  // Counts a node, and drops its reason from the search for a decoder.
  void keep(const Node& node, Counts& counts) {
    ++counts[node.op_type];
    std::erase_if(lowered_.on_host, [&](const auto& left) { return left.node == node.name; });
  }

  Lowered& lowered_;
  const Artifacts& artifacts_;
  Threshold threshold_;
  Counts on_array_;
  Counts below_;
  Counts convolutions_;
  std::string reason_;
};

}  // namespace

void lower_operators(Lowered& lowered, const Artifacts& artifacts, const Threshold& threshold) {
  OperatorLowering(lowered, artifacts, threshold).run();
}

void leave_operators(Lowered& lowered, const std::string& reason, bool better) {
  for (const Node& node : lowered.nodes) {
    if (is_operator(node)) leave(lowered, node, reason, better);
  }
}

}  // namespace flownpu::npu
