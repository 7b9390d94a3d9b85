// SPDX-License-Identifier: Apache-2.0
#include "ep/partition/schedule.h"

#include <algorithm>
#include <numeric>
#include <optional>
#include <utility>

#include "ops/error.h"

namespace flownpu {
namespace {

using Names = std::unordered_set<std::string>;

// Why a prompt cannot be sliced; caught in make_schedule.
class Whole final : public Error {
 public:
  using Error::Error;
};

bool lists(const std::vector<std::size_t>& positions, std::size_t position) {
  return std::ranges::find(positions, position) != positions.end();
}

class Slicer {
 public:
  Slicer(std::span<const Node> nodes, std::span<const std::unique_ptr<Step>> steps)
      : nodes_(nodes), in_slices_(nodes.size(), false) {
    for (std::size_t i = 0; i < nodes.size(); ++i) {
      const std::optional<Slicing> slicing = steps[i]->slicing(nodes[i]);
      may_be_sliced_.push_back(slicing.has_value());
      slicings_.push_back(slicing.value_or(Slicing()));
      for (const Value& output : nodes[i].outputs) {
        if (!output.name.empty()) computed_.insert(output.name);
      }
    }
  }

  Schedule schedule() {
    for (std::size_t i = 0; i < nodes_.size(); ++i) {
      if (slicings_[i].holds_tokens) slice(i);
    }
    if (sliced_.empty()) throw Whole("no step knows where tokens are");
    while (spread()) {
    }
    check_inputs();
    return order();
  }

 private:
  // Adds a step to those that are run in slices. Returns false if it was one already.
  bool slice(std::size_t index) {
    if (in_slices_[index]) return false;
    const Node& node = nodes_[index];
    if (!may_be_sliced_[index]) throw Whole(to_string(node) + " needs all tokens at once");
    in_slices_[index] = true;
    for (const std::size_t i : slicings_[index].inputs) {
      const Value* input = node.input(i);
      if (input != nullptr) sliced_.insert(input->name);
    }
    for (const std::size_t i : slicings_[index].outputs) {
      if (node.has_output(i)) sliced_.insert(node.outputs[i].name);
    }
    return true;
  }

  // Adds all steps that read or make slices of computed values; returns whether there were any. A
  // sliced input of the partition is no reason to add its reader: the input is also available
  // whole, and the reader may only need its shape.
  bool spread() {
    const auto is_slice = [this](const Value& value) {
      return computed_.contains(value.name) && sliced_.contains(value.name);
    };
    bool more = false;
    for (std::size_t i = 0; i < nodes_.size(); ++i) {
      if (std::ranges::any_of(nodes_[i].inputs, is_slice) ||
          std::ranges::any_of(nodes_[i].outputs, is_slice)) {
        more = slice(i) || more;
      }
    }
    return more;
  }

  // Throws Whole unless sliced values go only to inputs that take slices, and at least one of them
  // is an input of the partition.
  void check_inputs() const {
    bool cut = false;
    for (std::size_t i = 0; i < nodes_.size(); ++i) {
      if (!in_slices_[i]) continue;
      const Node& node = nodes_[i];
      const Slicing& slicing = slicings_[i];
      for (std::size_t j = 0; j < node.inputs.size(); ++j) {
        if (!sliced_.contains(node.inputs[j].name)) continue;
        if (node.inputs[j].constant != nullptr || !lists(slicing.inputs, j)) {
          throw Whole(to_string(node) + " needs all tokens of '" + node.inputs[j].name + "'");
        }
        cut = cut || !computed_.contains(node.inputs[j].name);
      }
      for (std::size_t j = 0; j < node.outputs.size(); ++j) {
        if (sliced_.contains(node.outputs[j].name) && !lists(slicing.outputs, j)) {
          throw Whole(to_string(node) + " makes all tokens of '" + node.outputs[j].name +
                      "' at once");
        }
      }
    }
    if (!cut) throw Whole("tokens are no input of the program");
  }

  Schedule order() {
    // Values that are complete only after the last slice.
    Names late;
    std::vector<std::size_t> before;
    std::vector<std::size_t> slices;
    std::vector<std::size_t> after;
    for (std::size_t i = 0; i < nodes_.size(); ++i) {
      const Node& node = nodes_[i];
      const auto input = std::ranges::find_if(
          node.inputs, [&late](const Value& value) { return late.contains(value.name); });
      const bool waits = input != node.inputs.end();
      if (in_slices_[i] && waits) {
        throw Whole(to_string(node) + " needs '" + input->name + "' of all tokens");
      }
      for (const Value& output : node.outputs) {
        if (!output.name.empty() && (waits || in_slices_[i]) && !sliced_.contains(output.name))
          late.insert(output.name);
      }
      (in_slices_[i] ? slices : waits ? after : before).push_back(i);
    }
    Schedule schedule;
    schedule.begin = before.size();
    schedule.end = before.size() + slices.size();
    schedule.order = std::move(before);
    schedule.order.insert(schedule.order.end(), slices.begin(), slices.end());
    schedule.order.insert(schedule.order.end(), after.begin(), after.end());
    schedule.sliced = std::move(sliced_);
    for (const std::size_t i : slices) {
      for (const std::size_t input : slicings_[i].blocks) {
        const Value* value = nodes_[i].input(input);
        if (value != nullptr) schedule.blocks.insert(value->name);
      }
    }
    return schedule;
  }

  std::span<const Node> nodes_;
  std::vector<bool> may_be_sliced_;
  std::vector<Slicing> slicings_;  // empty for a step that may not be sliced
  std::vector<bool> in_slices_;
  Names computed_;
  Names sliced_;
};

}  // namespace

Schedule make_schedule(std::span<const Node> nodes, std::span<const std::unique_ptr<Step>> steps) {
  try {
    return Slicer(nodes, steps).schedule();
  } catch (const Whole& whole) {
    Schedule schedule;
    schedule.order.resize(nodes.size());
    std::iota(schedule.order.begin(), schedule.order.end(), std::size_t{0});
    schedule.begin = schedule.end = nodes.size();
    schedule.reason = whole.what();
    return schedule;
  }
}

}  // namespace flownpu
