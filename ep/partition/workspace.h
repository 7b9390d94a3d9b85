// SPDX-License-Identifier: Apache-2.0
// ExecutionPlan::Workspace: the memory that one run of a partition needs, kept for the next run.
#pragma once

#include <algorithm>
#include <cstddef>
#include <memory>
#include <mutex>
#include <span>
#include <utility>
#include <vector>

#include "ep/partition/execution_plan.h"

namespace flownpu {

// Memory that grows on demand and never shrinks. Growing loses the contents.
class GrowingBuffer {
 public:
  std::byte* reserve(const Device& device, std::size_t bytes) {
    if (memory_ == nullptr || bytes > capacity_) {
      // The least is one cache line, so that the pointer is never null.
      const std::size_t wanted = std::max<std::size_t>(grown(capacity_, bytes), 64);
      free();
      memory_ = device.allocate(wanted);
      capacity_ = wanted;
    }
    return memory_.get();
  }
  void free() {
    memory_.reset();
    capacity_ = 0;
  }
  std::size_t capacity() const { return capacity_; }

  // A value that grows with the context grows by one token in each step, so growing by at least a
  // quarter avoids most allocations.
  static std::size_t grown(std::size_t before, std::size_t wanted) {
    return std::max(wanted, before + before / 4);
  }

 private:
  Memory memory_{nullptr, nullptr};
  std::size_t capacity_ = 0;
};

struct ExecutionPlan::Workspace {
  std::vector<Tensor> tensors;  // One for each value.
  // For each of `cut_`: the tensor of all tokens and, for a batch, memory for a slice.
  std::vector<Tensor> wholes;
  std::vector<GrowingBuffer> slices;
  // The current slice; its `tokens` is 0 while all are computed at once.
  TokenSlice slice;
  std::int64_t slice_tokens = 0;
  // For each value in a slot the most bytes so far, and the slot's number. `are_shared`: not in a
  // first run, where slots are the values' own. `grew`: a slot was too small in this run.
  std::vector<std::size_t> bytes;
  std::vector<std::size_t> slot_of;
  std::vector<GrowingBuffer> slots;
  bool are_shared = false;
  bool grew = false;
  GrowingBuffer scratch;
  // Whether a step has written to the memory of an input, so that the run cannot be repeated.
  bool appended = false;
  // The constants that a run streams, announced for the next run.
  std::vector<std::span<const std::byte>> streams;
  // Arguments of the current step.
  std::vector<Tensor> inputs;
  std::vector<Tensor> outputs;
  std::vector<Shape> shapes;
};

// Takes a workspace for the duration of a run.
class ExecutionPlan::Lease {
 public:
  Lease(const ExecutionPlan& plan, PlanIo& io) : plan_(plan) {
    {
      const std::scoped_lock lock(plan_.mutex_);
      if (!plan_.idle_.empty()) {
        workspace_ = std::move(plan_.idle_.back());
        plan_.idle_.pop_back();
      }
    }
    if (workspace_ != nullptr) return;
    workspace_ = std::make_unique<Workspace>(plan_.make_workspace(io));
    const std::scoped_lock lock(plan_.mutex_);
    plan_.idle_.reserve(plan_.workspaces_ + 1);
    ++plan_.workspaces_;
  }
  ~Lease() {
    const std::scoped_lock lock(plan_.mutex_);
    plan_.idle_.push_back(std::move(workspace_));
  }
  Lease(const Lease&) = delete;
  Lease& operator=(const Lease&) = delete;

  Workspace& operator*() const { return *workspace_; }

 private:
  const ExecutionPlan& plan_;
  std::unique_ptr<Workspace> workspace_;
};

}  // namespace flownpu
