// SPDX-License-Identifier: Apache-2.0
#include "ep/program.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <new>
#include <span>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "ops/error.h"

namespace flownpu {
namespace {

std::int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// Memory that grows and is kept. The contents do not survive growing.
class Buffer {
 public:
  std::byte* reserve(const Device& device, std::size_t bytes) {
    if (memory_ == nullptr || bytes > capacity_) {
      // A value that grows with the context does so by a token each step: a quarter more each time
      // keeps nearly all steps free of allocations. The least is one cache line, so that the
      // pointer is never null.
      const std::size_t wanted = std::max<std::size_t>({bytes, capacity_ + capacity_ / 4, 64});
      memory_.reset();
      capacity_ = 0;
      memory_ = device.allocate(wanted);
      capacity_ = wanted;
    }
    return memory_.get();
  }

 private:
  Memory memory_{nullptr, nullptr};
  std::size_t capacity_ = 0;
};

// Runs `body`, and names the node in the errors it throws.
template <typename Body>
auto naming(const Node& node, const Body& body) {
  try {
    return body();
  } catch (const std::bad_alloc&) {
    fail("[FlowNPU] out of memory in ", to_string(node));
  } catch (const std::exception& error) {
    const std::string_view message = error.what();
    if (message.find(to_string(node)) != std::string_view::npos) throw;
    fail("[FlowNPU] ", to_string(node), ": ", message);
  }
}

// Bytes that a value takes, as far as it is known before the first run: dimensions that are not
// count as 1. Only the order of these sizes matters.
std::size_t expected_bytes(const Value& value) {
  std::size_t bytes = size_of(value.type);
  if (value.shape) {
    for (const std::int64_t dim : *value.shape)
      bytes *= static_cast<std::size_t>(std::max<std::int64_t>(dim, 1));
  }
  return bytes;
}

}  // namespace

// What one run needs for itself.
struct Program::Workspace {
  std::vector<Tensor> tensors;  // One for each value.
  std::vector<Buffer> slots;
  Buffer scratch;
  // Arguments of the step at hand.
  std::vector<Tensor> inputs;
  std::vector<Tensor> outputs;
  std::vector<Shape> shapes;
};

// A workspace for the time of a run.
class Program::Lease {
 public:
  Lease(const Program& program, ProgramIo& io) : program_(program) {
    {
      const std::scoped_lock lock(program_.mutex_);
      if (!program_.idle_.empty()) {
        workspace_ = std::move(program_.idle_.back());
        program_.idle_.pop_back();
      }
    }
    if (workspace_ != nullptr) return;
    workspace_ = std::make_unique<Workspace>(program_.make_workspace(io));
    const std::scoped_lock lock(program_.mutex_);
    program_.idle_.reserve(program_.workspaces_ + 1);
    ++program_.workspaces_;
  }
  ~Lease() {
    const std::scoped_lock lock(program_.mutex_);
    program_.idle_.push_back(std::move(workspace_));
  }
  Lease(const Lease&) = delete;
  Lease& operator=(const Lease&) = delete;

  Workspace& operator*() const { return *workspace_; }

 private:
  const Program& program_;
  std::unique_ptr<Workspace> workspace_;
};

// Gives every value a home.
class Program::Planner {
 public:
  Planner(Program& program, const std::vector<std::string>& inputs,
          const std::vector<std::string>& outputs)
      : program_(program) {
    for (std::size_t i = 0; i < inputs.size(); ++i) input_index_.emplace(inputs[i], i);
    for (std::size_t i = 0; i < outputs.size(); ++i) output_index_.emplace(outputs[i], i);
  }

  void plan(std::vector<Node> nodes) {
    for (std::size_t step = 0; step < nodes.size(); ++step) {
      for (const Value& input : nodes[step].inputs) last_reader_[input.name] = step;
    }
    for (std::size_t step = 0; step < nodes.size(); ++step) add_step(std::move(nodes[step]), step);
    find_late_readers();
    program_.slots_ = slot_bytes_.size();
  }

 private:
  void add_step(Node node, std::size_t index) {
    PlannedStep step;
    for (const Value& input : node.inputs) {
      step.inputs.push_back(input.name.empty() ? kNowhere : read(input));
    }
    for (const Value& output : node.outputs) {
      step.outputs.push_back(output.name.empty() ? kNowhere : write(output));
    }
    for (const Value& input : node.inputs) {
      if (!input.name.empty() && last_reader_.at(input.name) == index) release(input.name);
    }
    // A step writes all outputs that its node names, also those that no one reads.
    for (const Value& output : node.outputs) {
      if (!output.name.empty() && !last_reader_.contains(output.name)) release(output.name);
    }
    step.step = naming(node, [&] { return program_.device_->prepare(node); });
    step.node = std::move(node);
    program_.steps_.push_back(std::move(step));
  }

  std::size_t read(const Value& value) {
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
      if (index == kNowhere) planned.tensor = program_.own_constant(value);
    } else if (index == kNowhere) {
      fail("[FlowNPU] value '", value.name,
           "' is neither computed before it is read nor an input of the partition");
    }
    return add(std::move(planned));
  }

  std::size_t write(const Value& value) {
    PlannedValue planned;
    planned.name = value.name;
    planned.tensor.type = value.type;
    if (const auto output = output_index_.find(value.name); output != output_index_.end()) {
      planned.home = Home::kOutput;
      planned.index = output->second;
    } else {
      planned.index = take_slot(expected_bytes(value));
    }
    return add(std::move(planned));
  }

  std::size_t add(PlannedValue value) {
    const std::size_t index = program_.values_.size();
    value_index_.emplace(value.name, index);
    program_.values_.push_back(std::move(value));
    return index;
  }

  // Of the free slots the smallest that is large enough; else the largest, which grows; else a new
  // one.
  std::size_t take_slot(std::size_t bytes) {
    auto best = free_slots_.end();
    for (auto slot = free_slots_.begin(); slot != free_slots_.end(); ++slot) {
      if (best == free_slots_.end()) {
        best = slot;
        continue;
      }
      const std::size_t size = slot_bytes_[*slot];
      const std::size_t best_size = slot_bytes_[*best];
      const bool better = best_size < bytes ? size > best_size : size >= bytes && size < best_size;
      if (better) best = slot;
    }
    if (best == free_slots_.end()) {
      slot_bytes_.push_back(bytes);
      return slot_bytes_.size() - 1;
    }
    const std::size_t slot = *best;
    free_slots_.erase(best);
    slot_bytes_[slot] = std::max(slot_bytes_[slot], bytes);
    return slot;
  }

  void release(const std::string& name) {
    const PlannedValue& value = program_.values_[value_index_.at(name)];
    if (value.home != Home::kSlot) return;
    // A node may read one value twice.
    if (std::ranges::find(free_slots_, value.index) == free_slots_.end())
      free_slots_.push_back(value.index);
  }

  void find_late_readers() {
    for (std::size_t step = 0; step < program_.steps_.size(); ++step) {
      for (const std::size_t written : program_.steps_[step].outputs) {
        if (written == kNowhere || program_.values_[written].home != Home::kOutput) continue;
        for (std::size_t value = 0; value < program_.values_.size(); ++value) {
          const PlannedValue& input = program_.values_[value];
          if (input.home == Home::kInput && last_reader_.at(input.name) > step) {
            program_.values_[written].read_later.push_back(value);
          }
        }
      }
    }
  }

  Program& program_;
  std::unordered_map<std::string, std::size_t> input_index_;
  std::unordered_map<std::string, std::size_t> output_index_;
  std::unordered_map<std::string, std::size_t> value_index_;
  std::unordered_map<std::string, std::size_t> last_reader_;  // The last step that reads a value.
  std::vector<std::size_t> slot_bytes_;
  std::vector<std::size_t> free_slots_;
};

Program::Program(std::shared_ptr<const Device> device, std::vector<Node> nodes,
                 const std::vector<std::string>& inputs, const std::vector<std::string>& outputs)
    : device_(std::move(device)) {
  Planner(*this, inputs, outputs).plan(std::move(nodes));
}

Program::~Program() = default;

// A constant that ORT does not pass at run time, copied: preparation is the only time it can be
// seen.
Tensor Program::own_constant(const Value& value) {
  Tensor tensor{nullptr, value.type, value.shape.value_or(Shape())};
  Memory memory = device_->allocate(std::max<std::size_t>(tensor.bytes(), 1));
  std::memcpy(memory.get(), value.constant, tensor.bytes());
  tensor.data = memory.get();
  owned_constants_.push_back(std::move(memory));
  return tensor;
}

Program::Workspace Program::make_workspace(ProgramIo& io) const {
  Workspace workspace;
  workspace.slots.resize(slots_);
  workspace.tensors.reserve(values_.size());
  for (const PlannedValue& value : values_) {
    // ORT maps external data anew when the session has been made; from then on initializers stay.
    const bool passed = value.home == Home::kConstant && value.index != kNowhere;
    workspace.tensors.push_back(passed ? io.input(value.index) : value.tensor);
  }
  for (const PlannedStep& step : steps_) {
    workspace.inputs.resize(std::max(workspace.inputs.size(), step.inputs.size()));
    workspace.outputs.resize(std::max(workspace.outputs.size(), step.outputs.size()));
  }
  workspace.shapes.resize(workspace.outputs.size());
  return workspace;
}

void Program::run(ProgramIo& io, StepObserver* observer) const {
  const Lease lease(*this, io);
  Workspace& workspace = *lease;
  for (std::size_t value = 0; value < values_.size(); ++value) {
    if (values_[value].home == Home::kInput)
      workspace.tensors[value] = io.input(values_[value].index);
  }
  for (const PlannedStep& step : steps_) {
    naming(step.node, [&] { run_step(step, workspace, io, observer); });
  }
  device_->wait();
}

void Program::run_step(const PlannedStep& step, Workspace& workspace, ProgramIo& io,
                       StepObserver* observer) const {
  for (std::size_t i = 0; i < step.inputs.size(); ++i) {
    workspace.inputs[i] = step.inputs[i] == kNowhere ? Tensor{} : workspace.tensors[step.inputs[i]];
  }
  const std::span<const Tensor> inputs(workspace.inputs.data(), step.inputs.size());
  step.step->infer(inputs, std::span(workspace.shapes).first(step.outputs.size()));
  place_outputs(step, workspace, io);
  const std::span<const Tensor> outputs(workspace.outputs.data(), step.outputs.size());

  const std::size_t scratch_bytes = step.step->scratch_bytes(inputs);
  std::byte* scratch =
      scratch_bytes == 0 ? nullptr : workspace.scratch.reserve(*device_, scratch_bytes);
  const std::int64_t begin = observer == nullptr ? 0 : now_ns();
  step.step->run(inputs, outputs, std::span(scratch, scratch_bytes));
  if (observer != nullptr) {
    device_->wait();
    observer->ran(step.node, outputs, begin, now_ns());
  }
}

void Program::place_outputs(const PlannedStep& step, Workspace& workspace, ProgramIo& io) const {
  for (std::size_t i = 0; i < step.outputs.size(); ++i) {
    Tensor& output = workspace.outputs[i];
    output = {.data = nullptr, .type = step.node.outputs[i].type, .shape = workspace.shapes[i]};
    if (step.outputs[i] == kNowhere) continue;
    const PlannedValue& value = values_[step.outputs[i]];
    if (value.home == Home::kOutput) {
      output.data = io.output(value.index, output.shape);
    } else {
      output.data = workspace.slots[value.index].reserve(*device_, output.bytes());
    }
    workspace.tensors[step.outputs[i]] = output;
    if (value.home == Home::kOutput) check_memory(value, workspace);
  }
}

// A caller may bind an output to the memory of an input; a KV cache that is appended to in place is
// that. It must then be an input that no later step still reads.
void Program::check_memory(const PlannedValue& output, const Workspace& workspace) const {
  const auto index = static_cast<std::size_t>(&output - values_.data());
  const auto* begin = workspace.tensors[index].as<std::byte>();
  const auto* end = begin + workspace.tensors[index].bytes();
  for (const std::size_t value : output.read_later) {
    const auto* other = workspace.tensors[value].as<std::byte>();
    const auto* other_end = other + workspace.tensors[value].bytes();
    if (begin < other_end && other < end) {
      fail("output '", output.name, "' is bound to the memory of input '", values_[value].name,
           "', which is still read after the output is written; bind them to separate buffers");
    }
  }
}

std::int64_t Program::multiply_adds() const {
  std::int64_t sum = 0;
  for (const PlannedStep& step : steps_) sum += step.step->multiply_adds();
  return sum;
}

}  // namespace flownpu
