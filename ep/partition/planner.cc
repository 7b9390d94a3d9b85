// SPDX-License-Identifier: Apache-2.0
#include "ep/partition/planner.h"

#include <algorithm>
#include <ranges>
#include <utility>

namespace flownpu {

ExecutionPlan::Planner::Planner(ExecutionPlan& plan, const std::vector<std::string>& inputs,
                                const std::vector<std::string>& outputs)
    : plan_(plan) {
  for (std::size_t i = 0; i < inputs.size(); ++i) input_index_.emplace(inputs[i], i);
  for (std::size_t i = 0; i < outputs.size(); ++i) output_index_.emplace(outputs[i], i);
}

void ExecutionPlan::Planner::plan(std::vector<Node> nodes) {
  std::vector<std::unique_ptr<Step>> steps;
  steps.reserve(nodes.size());
  for (const Node& node : nodes)
    steps.push_back(naming(node, [&] { return plan_.device_->prepare(node); }));
  schedule_ = make_schedule(nodes, steps);
  find_lives(nodes);
  for (std::size_t index = 0; index < nodes.size(); ++index) {
    if (index == schedule_.begin) {
      // Outputs that several slices complete need their memory from the first slice on.
      for (std::size_t i = schedule_.begin; i < schedule_.end; ++i) {
        for (const Value& output : nodes[schedule_.order[i]].outputs) {
          if (!output.name.empty() && !schedule_.sliced.contains(output.name)) write(output);
        }
      }
    }
    const std::size_t node = schedule_.order[index];
    add_step(std::move(nodes[node]), std::move(steps[node]), index);
  }
  find_late_readers();
  find_streams();
  find_last_readers();
  plan_.slices_begin_ = schedule_.begin;
  plan_.slices_end_ = schedule_.end;
  plan_.why_whole_ = schedule_.reason;
}

void ExecutionPlan::Planner::find_lives(const std::vector<Node>& nodes) {
  last_read_.resize(nodes.size());
  const std::size_t last_of_slice = schedule_.end - 1;
  const auto in_slices = [this](std::size_t index) {
    return schedule_.begin <= index && index < schedule_.end;
  };
  for (std::size_t index = 0; index < nodes.size(); ++index) {
    const Node& node = nodes[schedule_.order[index]];
    const auto extend = [&](const Value& value) {
      if (value.name.empty()) return;
      // The next slice reads, or writes to, values that are not sliced again.
      const bool again = in_slices(index) && !schedule_.sliced.contains(value.name);
      last_reader_[value.name] = again ? last_of_slice : index;
    };
    for (const Value& input : node.inputs) extend(input);
    // A step writes all outputs that its node names, even if nobody reads them.
    for (const Value& output : node.outputs) extend(output);
  }
  for (const auto& [name, index] : last_reader_) last_read_[index].push_back(name);
}

void ExecutionPlan::Planner::add_step(Node node, std::unique_ptr<Step> step, std::size_t index) {
  PlannedStep planned;
  for (const Value& input : node.inputs) {
    planned.inputs.push_back(input.name.empty() ? kNowhere : read(input));
  }
  const std::size_t repeated = step->repeated_input().value_or(node.inputs.size());
  for (const Value& output : node.outputs) {
    const bool repeats = repeated < node.inputs.size() && planned.outputs.empty();
    const std::size_t same = repeats ? planned.inputs[repeated] : kNowhere;
    planned.outputs.push_back(output.name.empty() ? kNowhere : write(output, same));
  }
  for (const std::string& name : last_read_[index]) {
    const PlannedValue& value = plan_.values_[value_index_.at(name)];
    if (value.home == Home::kSlot)
      plan_.lives_[value.index].steps.front().second = static_cast<int>(index);
  }
  planned.step = std::move(step);
  planned.node = std::move(node);
  planned.node.packed.clear();
  plan_.steps_.push_back(std::move(planned));
}

// Values that slices share, which are in no list, stay for the next slice.
void ExecutionPlan::Planner::find_last_readers() {
  std::vector<bool> stays(plan_.lives_.size());
  for (const PlannedValue& value : plan_.values_) {
    if (value.home != Home::kSlot || value.sliced) continue;
    const auto last = static_cast<std::size_t>(plan_.lives_[value.index].steps.front().second);
    stays[value.index] = schedule_.begin <= last && last < schedule_.end;
  }
  for (std::size_t value = 0; value < plan_.lives_.size(); ++value) {
    const auto last = static_cast<std::size_t>(plan_.lives_[value].steps.front().second);
    if (!stays[value]) plan_.steps_[last].last_read.push_back(value);
  }
}

// Finds the values that steps stream. Only constants and inputs of the partition can be announced
// ahead, because they exist before the steps run.
void ExecutionPlan::Planner::find_streams() {
  std::size_t next = kNowhere;
  for (PlannedStep& step : std::views::reverse(plan_.steps_)) {
    step.next_streamed = next;
    const std::size_t input = step.step->streamed_input().value_or(step.inputs.size());
    if (input >= step.inputs.size() || step.inputs[input] == kNowhere) continue;
    const Home home = plan_.values_[step.inputs[input]].home;
    if (home == Home::kConstant || home == Home::kInput) next = step.inputs[input];
    if (home == Home::kConstant) plan_.streamed_.push_back(next);
  }
  std::ranges::reverse(plan_.streamed_);
}

std::size_t ExecutionPlan::Planner::read(const Value& value) {
  if (const auto known = value_index_.find(value.name); known != value_index_.end())
    return known->second;
  const auto input = input_index_.find(value.name);
  const std::size_t index = input == input_index_.end() ? kNowhere : input->second;
  PlannedValue planned;
  planned.name = value.name;
  planned.home = Home::kInput;
  planned.index = index;
  if (value.constant != nullptr) {
    planned.home = Home::kConstant;
    if (value.owner != nullptr) planned.index = kNowhere;
    if (planned.index == kNowhere) planned.tensor = plan_.own_constant(value);
  } else if (index == kNowhere) {
    fail("[FlowNPU] value '", value.name,
         "' is neither computed before it is read nor an input of the program");
  }
  return add(std::move(planned));
}

std::size_t ExecutionPlan::Planner::write(const Value& value, std::size_t same) {
  if (const auto known = value_index_.find(value.name); known != value_index_.end())
    return known->second;
  PlannedValue planned;
  planned.name = value.name;
  planned.tensor.type = value.type;
  if (const auto output = output_index_.find(value.name); output != output_index_.end()) {
    planned.home = Home::kOutput;
    planned.index = output->second;
  } else if (same != kNowhere && plan_.values_[same].home == Home::kSlot) {
    planned.index = plan_.values_[same].index;
  } else {
    planned.index = plan_.lives_.size();
    const auto step = static_cast<int>(plan_.steps_.size());
    plan_.lives_.push_back({.bytes = 0, .steps = {{step, step}}});
  }
  return add(std::move(planned));
}

std::size_t ExecutionPlan::Planner::add(PlannedValue value) {
  const std::size_t index = plan_.values_.size();
  value_index_.emplace(value.name, index);
  if (schedule_.sliced.contains(value.name)) {
    value.sliced = true;
    if (value.home == Home::kInput || value.home == Home::kOutput) plan_.cut_.push_back(index);
  }
  if (schedule_.blocks.contains(value.name)) plan_.blocks_.push_back(index);
  plan_.values_.push_back(std::move(value));
  return index;
}

// Finds, for each output of the partition, the inputs that are read after it has been written.
// Sliced steps read their inputs again after all of them have written outputs. A step's own inputs
// do not count: an output may share their memory.
void ExecutionPlan::Planner::find_late_readers() {
  std::vector<std::vector<std::size_t>> readers(plan_.values_.size());
  for (std::size_t step = 0; step < plan_.steps_.size(); ++step) {
    for (const std::size_t value : plan_.steps_[step].inputs) {
      if (value != kNowhere && plan_.values_[value].home == Home::kInput)
        readers[value].push_back(step);
    }
  }
  for (std::size_t step = 0; step < plan_.steps_.size(); ++step) {
    const bool repeats = schedule_.begin <= step && step < schedule_.end;
    const std::size_t first = repeats ? schedule_.begin : step;
    for (const std::size_t written : plan_.steps_[step].outputs) {
      if (written == kNowhere || plan_.values_[written].home != Home::kOutput) continue;
      for (std::size_t value = 0; value < readers.size(); ++value) {
        const auto late = [&](std::size_t reader) { return reader >= first && reader != step; };
        if (std::ranges::any_of(readers[value], late))
          plan_.values_[written].read_later.push_back(value);
      }
    }
  }
}

}  // namespace flownpu
