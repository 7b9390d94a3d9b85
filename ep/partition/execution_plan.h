// SPDX-License-Identifier: Apache-2.0
// ExecutionPlan: a compiled partition, independent of ONNX Runtime: its steps in order, and the
// place of every value in memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "ops/device.h"
#include "ops/dispatch_observer.h"
#include "ops/nodes/node.h"
#include "ops/shared_buffers.h"

namespace flownpu {

// The inputs and outputs of a run.
class PlanIo {
 public:
  virtual ~PlanIo() = default;
  virtual Tensor input(std::size_t index) = 0;
  // The memory of an output, for the shape that was inferred for it. Called once for each output in
  // a run.
  virtual void* output(std::size_t index, const Shape& shape) = 0;
};

// Receives every step of a profiled run, and its device's dispatches.
class StepObserver : public DispatchObserver {
 public:
  // Called after each step. `held`: bytes of the slots. `begin_ns`, `end_ns`:
  // std::chrono::steady_clock.
  virtual void ran(const Node& node, std::span<const Tensor> outputs, std::size_t held,
                   std::int64_t begin_ns, std::int64_t end_ns) = 0;
};

// Memory: constants are used in place, outputs of the partition are written to the caller's memory,
// and every other value is in a slot. Sizes are often known in a run only. So a workspace's first
// run has a slot for each value, allocated when it is written and freed when it has been read; then
// values that are not needed at the same time share slots (shared_buffers.h). Slots grow when a run
// needs more than any before it, after which values are shared out anew, and never shrink: a decode
// step that is no larger than the last allocates nothing.
//
// Long prompts: the sliced steps of the schedule (schedule.h) are run for a few hundred tokens, as
// many as the device prefers, then for the next ones; slots only hold one slice. Slices of the
// partition's inputs and outputs are copied if the batch has several rows.
//
// Runs may overlap: each takes a workspace from a list of those not in use.
class ExecutionPlan {
 public:
  // `nodes` in topological order; `inputs` and `outputs` name the values that PlanIo passes, in
  // its order. Throws Error naming the node whose preparation fails.
  ExecutionPlan(std::shared_ptr<const Device> device, std::vector<Node> nodes,
                const std::vector<std::string>& inputs, const std::vector<std::string>& outputs);
  ~ExecutionPlan();

  // `observer` may be null. Throws Error naming the failed node: Unsupported if the device cannot
  // compute this run and nothing was changed, DeviceFailed if the device takes no more runs.
  void run(PlanIo& io, StepObserver* observer) const;

  // PlanIo's indices of the inputs that are not constants.
  std::vector<std::size_t> fed() const;
  // The sum of the steps' multiply-adds for one token.
  std::int64_t multiply_adds() const;
  // The reason why long prompts are computed at once; empty if they are computed in slices.
  const std::string& why_whole() const { return why_whole_; }

 private:
  static constexpr std::size_t kNowhere = std::numeric_limits<std::size_t>::max();

  enum class Home : std::uint8_t { kInput, kConstant, kOutput, kSlot };

  struct PlannedValue {
    std::string name;
    Home home = Home::kSlot;
    // The index of the input or output, or of the value among those that need slots; values that
    // repeat one another have one.
    std::size_t index = kNowhere;
    // Set for a constant that ORT does not pass at run time.
    Tensor tensor;
    // Whether steps see only one slice of it at a time. Slices of the partition's inputs and
    // outputs are cut out of the whole value.
    bool sliced = false;
    // Inputs of the partition that are read after an output has been written: they must not share
    // its memory.
    std::vector<std::size_t> read_later;
  };

  struct PlannedStep {
    Node node;
    std::unique_ptr<Step> step;
    // Indices of values; kNowhere for an absent input and for an output that is left out.
    std::vector<std::size_t> inputs;
    std::vector<std::size_t> outputs;
    // The values in slots that nobody reads after this step.
    std::vector<std::size_t> last_read;
    // The next value that a later step streams (Step::streamed_input); kNowhere if none does.
    std::size_t next_streamed = kNowhere;
  };

  struct Workspace;
  class Lease;
  class Planner;

  Tensor own_constant(const Value& value);
  Workspace make_workspace(PlanIo& io) const;
  void share_slots(Workspace& workspace) const;
  void run_slices(Workspace& workspace, PlanIo& io, StepObserver* observer) const;
  const Shape* prompt_shape(const Workspace& workspace) const;
  std::int64_t slice_end(const Workspace& workspace, std::int64_t first, std::int64_t tokens,
                         std::int64_t at_once) const;
  void cut_inputs(Workspace& workspace) const;
  void join_outputs(const Workspace& workspace) const;
  void run_steps(std::size_t begin, std::size_t end, Workspace& workspace, PlanIo& io,
                 StepObserver* observer) const;
  void run_step(const PlannedStep& step, Workspace& workspace, PlanIo& io,
                StepObserver* observer) const;
  void free_slots(const PlannedStep& step, Workspace& workspace) const;
  void expect(std::size_t value, const Workspace& workspace) const;
  const Tensor* constant_of(const PlannedStep& step, std::size_t output,
                            const Workspace& workspace) const;
  void place_outputs(const PlannedStep& step, Workspace& workspace, PlanIo& io) const;
  void* place(std::size_t value, const Tensor& tensor, Workspace& workspace, PlanIo& io) const;
  void* place_in_slot(std::size_t value, std::size_t bytes, Workspace& workspace) const;
  std::size_t cut_index(std::size_t value) const;
  void check_memory(const PlannedValue& output, const Workspace& workspace) const;

  std::shared_ptr<const Device> device_;
  std::vector<Memory> owned_constants_;
  std::vector<std::shared_ptr<const void>> owners_;
  std::vector<PlannedValue> values_;
  std::vector<PlannedStep> steps_;
  // The constants that steps stream, in the order of the steps.
  std::vector<std::size_t> streamed_;
  std::vector<Lifetime> lives_;  // of the values in slots
  // The range of steps that are run slice by slice; the sliced inputs and outputs of the partition;
  // and the values that say where slices may be cut (Slicing::blocks).
  std::size_t slices_begin_ = 0;
  std::size_t slices_end_ = 0;
  std::vector<std::size_t> cut_;
  std::vector<std::size_t> blocks_;
  std::string why_whole_;
  mutable std::mutex mutex_;
  // Its capacity is at least workspaces_, so that giving one back cannot fail.
  mutable std::vector<std::unique_ptr<Workspace>> idle_;
  mutable std::size_t workspaces_ = 0;
};

}  // namespace flownpu
