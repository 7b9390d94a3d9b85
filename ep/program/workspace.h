// SPDX-License-Identifier: Apache-2.0
// Program::Workspace: what one run of a program needs for itself, kept for the next.
#pragma once

#include <algorithm>
#include <cstddef>
#include <memory>
#include <mutex>
#include <span>
#include <utility>
#include <vector>

#include "ep/program/program.h"

namespace flownpu {

// Memory that grows and is kept. The contents do not survive growing.
class GrowingBuffer {
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

struct Program::Workspace {
  std::vector<Tensor> tensors;  // One for each value.
  // For each of `cut_`: all tokens of it, and, of a batch, memory for a slice.
  std::vector<Tensor> wholes;
  std::vector<GrowingBuffer> slices;
  // The slice at hand; of no tokens while all are computed at once.
  TokenSlice slice;
  std::int64_t slice_tokens = 0;
  std::vector<GrowingBuffer> slots;
  GrowingBuffer scratch;
  // Whether a step has written to the memory of an input, which then is not what it was.
  bool appended = false;
  // What the next run streams.
  std::vector<std::span<const std::byte>> streams;
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

}  // namespace flownpu
