// SPDX-License-Identifier: Apache-2.0
#include "ep/partition/execution_plan.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <numeric>
#include <optional>
#include <span>
#include <utility>

#include "ep/partition/planner.h"
#include "ep/partition/workspace.h"
#include "ops/cancellation.h"
#include "ops/error.h"
#include "ops/system/memory.h"

namespace flownpu {
namespace {

std::int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// Copies between a value of all tokens [batch, tokens, ..] and a dense slice of it: kCut to the
// slice, kJoin back.
enum class Copy : std::uint8_t { kCut, kJoin };

void copy(Copy direction, const Tensor& whole, const Tensor& slice) {
  const std::int64_t batch = whole.shape[0];
  const std::size_t bytes = slice.bytes() / static_cast<std::size_t>(batch);
  const std::size_t stride = whole.bytes() / static_cast<std::size_t>(batch);
  const std::size_t token = bytes / static_cast<std::size_t>(slice.shape[1]);
  std::byte* all = whole.as<std::byte>() + static_cast<std::size_t>(slice.slice.first) * token;
  std::byte* some = slice.as<std::byte>();
  for (std::int64_t row = 0; row < batch; ++row, all += stride, some += bytes) {
    if (direction == Copy::kCut) {
      std::memcpy(some, all, bytes);
    } else {
      std::memcpy(all, some, bytes);
    }
  }
}

}  // namespace

ExecutionPlan::ExecutionPlan(std::shared_ptr<const Device> device, std::vector<Node> nodes,
                             const std::vector<std::string>& inputs,
                             const std::vector<std::string>& outputs)
    : device_(std::move(device)) {
  Planner(*this, inputs, outputs).plan(std::move(nodes));
}

ExecutionPlan::~ExecutionPlan() = default;

// A constant that ORT does not pass at run time. It is visible only during preparation, so it is
// copied unless an owner keeps it alive.
Tensor ExecutionPlan::own_constant(const Value& value) {
  Tensor tensor{nullptr, value.type, value.shape.value_or(Shape())};
  if (value.owner != nullptr) {  // used in place; tensor views are not const
    owners_.push_back(value.owner);
    tensor.data = const_cast<void*>(value.constant);
    return tensor;
  }
  Memory memory = device_->allocate(std::max<std::size_t>(tensor.bytes(), 1));
  std::memcpy(memory.get(), value.constant, tensor.bytes());
  tensor.data = memory.get();
  owned_constants_.push_back(std::move(memory));
  return tensor;
}

ExecutionPlan::Workspace ExecutionPlan::make_workspace(PlanIo& io) const {
  Workspace workspace;
  workspace.bytes.resize(lives_.size());
  workspace.slots.resize(lives_.size());
  workspace.slot_of.resize(lives_.size());
  std::iota(workspace.slot_of.begin(), workspace.slot_of.end(), std::size_t{0});
  workspace.wholes.resize(cut_.size());
  workspace.slices.resize(cut_.size());
  workspace.tensors.reserve(values_.size());
  for (const PlannedValue& value : values_) {
    // ORT's constants move once, when the session has been made.
    const bool passed = value.home == Home::kConstant && value.index != kNowhere;
    workspace.tensors.push_back(passed ? io.input(value.index) : value.tensor);
  }
  for (const std::size_t value : streamed_) {
    const Tensor& tensor = workspace.tensors[value];
    workspace.streams.emplace_back(tensor.as<const std::byte>(), tensor.bytes());
  }
  for (const PlannedStep& step : steps_) {
    workspace.inputs.resize(std::max(workspace.inputs.size(), step.inputs.size()));
    workspace.outputs.resize(std::max(workspace.outputs.size(), step.outputs.size()));
  }
  workspace.shapes.resize(workspace.outputs.size());
  return workspace;
}

void ExecutionPlan::run(PlanIo& io, StepObserver* observer) const {
  const ObservedDispatches observed(observer);
  const Lease lease(*this, io);
  Workspace& workspace = *lease;
  for (std::size_t value = 0; value < values_.size(); ++value) {
    if (values_[value].home == Home::kInput)
      workspace.tensors[value] = io.input(values_[value].index);
  }
  workspace.slice = {};
  workspace.appended = false;
  try {
    run_steps(0, slices_begin_, workspace, io, observer);
    run_slices(workspace, io, observer);
    run_steps(slices_end_, steps_.size(), workspace, io, observer);
  } catch (const Unsupported& error) {
    if (!workspace.appended) throw;
    fail(error.what(), "; keys and values were appended in place before, so that no other device ",
         "can compute this run any more: begin the conversation anew");
  }
  device_->wait();
  if (!workspace.are_shared || workspace.grew) share_slots(workspace);
}

// Shares slots out among values of the sizes that runs have had so far, and allocates them, so that
// the next run need not.
void ExecutionPlan::share_slots(Workspace& workspace) const {
  std::vector<Lifetime> lives = lives_;
  for (std::size_t value = 0; value < lives.size(); ++value)
    lives[value].bytes = workspace.bytes[value];
  SharedBuffers shared = share_buffers(lives);
  workspace.slots = std::vector<GrowingBuffer>(shared.bytes.size());
  workspace.slot_of = std::move(shared.buffer);
  workspace.are_shared = true;
  workspace.grew = false;
  for (std::size_t slot = 0; slot < shared.bytes.size(); ++slot)
    workspace.slots[slot].reserve(*device_, shared.bytes[slot]);
}

// Frees what nobody reads any more, in a first run.
void ExecutionPlan::free_slots(const PlannedStep& step, Workspace& workspace) const {
  if (workspace.are_shared || step.last_read.empty()) return;
  device_->wait();  // it may only now read the memory, or keep it until then
  for (const std::size_t value : step.last_read) workspace.slots[value].free();
}

void ExecutionPlan::run_slices(Workspace& workspace, PlanIo& io, StepObserver* observer) const {
  const Shape* prompt = prompt_shape(workspace);
  const std::int64_t tokens = prompt == nullptr ? 0 : (*prompt)[1];
  const std::int64_t at_once = tokens > 1 ? device_->tokens_at_once((*prompt)[0]) : 0;
  if (slice_end(workspace, 0, tokens, at_once) == tokens) {
    run_steps(slices_begin_, slices_end_, workspace, io, observer);
    return;
  }
  for (std::size_t i = 0; i < cut_.size(); ++i) workspace.wholes[i] = workspace.tensors[cut_[i]];
  workspace.slice.tokens = tokens;
  for (std::int64_t first = 0; first < tokens; first += workspace.slice_tokens) {
    workspace.slice.first = first;
    workspace.slice_tokens = slice_end(workspace, first, tokens, at_once) - first;
    cut_inputs(workspace);
    run_steps(slices_begin_, slices_end_, workspace, io, observer);
    join_outputs(workspace);
  }
  workspace.slice = {};
  for (std::size_t i = 0; i < cut_.size(); ++i) workspace.tensors[cut_[i]] = workspace.wholes[i];
}

// The end of the slice that begins with token `first`. A slice has as many tokens as the device
// prefers, and more if it would cut a bidirectional block.
std::int64_t ExecutionPlan::slice_end(const Workspace& workspace, std::int64_t first,
                                      std::int64_t tokens, std::int64_t at_once) const {
  std::int64_t end = first + next_slice(tokens - first, at_once);
  for (std::int64_t before = 0; before != end;) {
    before = end;
    for (const std::size_t value : blocks_) end = after_blocks(workspace.tensors[value], end);
  }
  return tokens - end < at_once / 4 ? tokens : end;
}

// The shape [batch, tokens, ..] of a sliced input. Null if there is none, or the inputs disagree;
// steps then run without slices, and report the fault.
const Shape* ExecutionPlan::prompt_shape(const Workspace& workspace) const {
  const Shape* first = nullptr;
  for (const std::size_t value : cut_) {
    if (values_[value].home != Home::kInput) continue;
    const Shape& shape = workspace.tensors[value].shape;
    if (shape.rank() < 2) return nullptr;
    if (first == nullptr) first = &shape;
    if (shape[0] != (*first)[0] || shape[1] != (*first)[1]) return nullptr;
  }
  return first;
}

void ExecutionPlan::cut_inputs(Workspace& workspace) const {
  for (std::size_t i = 0; i < cut_.size(); ++i) {
    if (values_[cut_[i]].home != Home::kInput) continue;
    const Tensor& whole = workspace.wholes[i];
    Tensor& slice = workspace.tensors[cut_[i]];
    slice = whole;
    slice.shape[1] = workspace.slice_tokens;
    slice.slice = workspace.slice;
    if (whole.shape[0] == 1) {
      slice.data = whole.as<std::byte>() + slice.bytes() /
                                               static_cast<std::size_t>(workspace.slice_tokens) *
                                               static_cast<std::size_t>(workspace.slice.first);
    } else {
      slice.data = workspace.slices[i].reserve(*device_, slice.bytes());
      copy(Copy::kCut, whole, slice);
    }
  }
}

void ExecutionPlan::join_outputs(const Workspace& workspace) const {
  for (std::size_t i = 0; i < cut_.size(); ++i) {
    if (values_[cut_[i]].home == Home::kOutput && workspace.wholes[i].shape[0] > 1)
      copy(Copy::kJoin, workspace.wholes[i], workspace.tensors[cut_[i]]);
  }
}

void ExecutionPlan::run_steps(std::size_t begin, std::size_t end, Workspace& workspace, PlanIo& io,
                              StepObserver* observer) const {
  for (std::size_t i = begin; i < end; ++i) {
    check_cancelled();
    naming(steps_[i].node, [&] { run_step(steps_[i], workspace, io, observer); });
  }
}

void ExecutionPlan::run_step(const PlannedStep& step, Workspace& workspace, PlanIo& io,
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
  expect(step.next_streamed, workspace);
  const std::int64_t begin = observer == nullptr ? 0 : now_ns();
  step.step->run(inputs, outputs, std::span(scratch, scratch_bytes));
  if (observer != nullptr) {
    device_->wait();
    const std::int64_t end = now_ns();
    std::size_t held = 0;
    for (const GrowingBuffer& slot : workspace.slots) held += slot.capacity();
    observer->ran(step.node, outputs, held, begin, end);
  }
  free_slots(step, workspace);
}

void ExecutionPlan::expect(std::size_t value, const Workspace& workspace) const {
  if (value == kNowhere) return device_->expect(workspace.streams);
  const Tensor& tensor = workspace.tensors[value];
  const std::span<const std::byte> stream(tensor.as<const std::byte>(), tensor.bytes());
  device_->expect({&stream, 1});
}

// The constant that an output repeats (Step::same_as), if it need not be copied; else null.
const Tensor* ExecutionPlan::constant_of(const PlannedStep& step, std::size_t output,
                                         const Workspace& workspace) const {
  if (values_[step.outputs[output]].home != Home::kSlot) return nullptr;
  const auto inputs = std::span(workspace.inputs).first(step.inputs.size());
  const std::optional<std::size_t> input = step.step->same_as(output, inputs);
  const bool stays = input && step.inputs[*input] != kNowhere &&
                     values_[step.inputs[*input]].home == Home::kConstant;
  return stays ? &inputs[*input] : nullptr;
}

void ExecutionPlan::place_outputs(const PlannedStep& step, Workspace& workspace, PlanIo& io) const {
  for (std::size_t i = 0; i < step.outputs.size(); ++i) {
    Tensor& output = workspace.outputs[i];
    output = {.data = nullptr, .type = step.node.outputs[i].type, .shape = workspace.shapes[i]};
    if (step.outputs[i] == kNowhere) continue;
    (void)output.bytes();  // throws Error before an impossible size is allocated
    const PlannedValue& value = values_[step.outputs[i]];
    if (value.sliced) output.slice = workspace.slice;
    const Tensor* same = constant_of(step, i, workspace);
    output.data = same != nullptr ? same->data : place(step.outputs[i], output, workspace, io);
    workspace.tensors[step.outputs[i]] = output;
    if (value.home != Home::kOutput) continue;
    if (workspace.slice.first == 0) check_memory(value, workspace);
    const auto inputs = std::span(workspace.inputs).first(step.inputs.size());
    const bool appended = std::ranges::any_of(inputs, [&](const Tensor& input) {
      return output.data != nullptr && input.data == output.data;
    });
    workspace.appended = workspace.appended || appended;
    // 32 rows of logits of a vocabulary of 262144 take 32 MiB, for example.
    if (!appended && output.data != nullptr)
      ask_for_large_pages({output.as<const std::byte>(), output.bytes()});
  }
}

void* ExecutionPlan::place_in_slot(std::size_t value, std::size_t bytes,
                                   Workspace& workspace) const {
  std::size_t& most = workspace.bytes[value];
  if (bytes > most) most = workspace.are_shared ? GrowingBuffer::grown(most, bytes) : bytes;
  GrowingBuffer& slot = workspace.slots[workspace.slot_of[value]];
  workspace.grew = workspace.grew || bytes > slot.capacity();
  return slot.reserve(*device_, bytes);
}

std::size_t ExecutionPlan::cut_index(std::size_t value) const {
  return static_cast<std::size_t>(std::ranges::find(cut_, value) - cut_.begin());
}

void* ExecutionPlan::place(std::size_t index, const Tensor& output, Workspace& workspace,
                           PlanIo& io) const {
  const PlannedValue& value = values_[index];
  const TokenSlice& slice = workspace.slice;
  if (value.home == Home::kSlot) return place_in_slot(value.index, output.bytes(), workspace);
  if (slice.tokens == 0) return io.output(value.index, output.shape);
  if (!value.sliced) {  // all slices use the first one's memory
    return slice.first == 0 ? io.output(value.index, output.shape) : workspace.tensors[index].data;
  }
  const std::size_t cut = cut_index(index);
  Tensor& whole = workspace.wholes[cut];
  if (slice.first == 0) {
    whole = output;
    whole.shape[1] = slice.tokens;
    whole.data = io.output(value.index, whole.shape);
  }
  if (whole.shape[0] > 1) return workspace.slices[cut].reserve(*device_, output.bytes());
  return whole.as<std::byte>() + output.bytes() / static_cast<std::size_t>(output.shape[1]) *
                                     static_cast<std::size_t>(slice.first);
}

// A caller may bind an output to the memory of an input, as it does for a KV cache that is appended
// to in place. Throws Error if a later step still reads that input.
void ExecutionPlan::check_memory(const PlannedValue& output, const Workspace& workspace) const {
  const auto memory = [&](std::size_t index) {
    const bool cut = values_[index].sliced && workspace.slice.tokens > 0;
    const Tensor& all = cut ? workspace.wholes[cut_index(index)] : workspace.tensors[index];
    return std::span(all.as<const std::byte>(), all.bytes());
  };
  const auto written = memory(static_cast<std::size_t>(&output - values_.data()));
  for (const std::size_t value : output.read_later) {
    const auto read = memory(value);
    if (written.data() < read.data() + read.size() &&
        read.data() < written.data() + written.size()) {
      fail("output '", output.name, "' is bound to the memory of input '", values_[value].name,
           "', which is still read after the output is written; bind them to separate buffers");
    }
  }
}

std::vector<std::size_t> ExecutionPlan::fed() const {
  std::vector<std::size_t> indices;
  for (const PlannedValue& value : values_) {
    if (value.home == Home::kInput) indices.push_back(value.index);
  }
  return indices;
}

std::int64_t ExecutionPlan::multiply_adds() const {
  std::int64_t sum = 0;
  for (const PlannedStep& step : steps_) sum += step.step->multiply_adds();
  return sum;
}

}  // namespace flownpu
