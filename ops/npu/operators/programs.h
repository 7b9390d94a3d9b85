// SPDX-License-Identifier: Apache-2.0
// OperatorPrograms: the programs of a node by itself, bound to its constants, and which of them a
// run takes.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "ops/npu/artifacts/compiled_designs.h"
#include "ops/npu/match/array_operator.h"
#include "ops/npu/run/program.h"

namespace flownpu::npu {

// The buffers that operators by themselves share, since one runs after the other: activations,
// results, dequantised weights, keys and values of a call.
class SharedBuffers {
 public:
  // The one of this name and size: made now, as zeros, or that of another who still has it.
  std::shared_ptr<Buffer> get(Runtime& runtime, const std::string& name, std::size_t bytes);
  // For all of the programs' buffers that are scratch.
  ProgramBuffers::Makers makers(Runtime& runtime, std::span<const ProgramRecord* const> programs);

  // Held by whoever uses them, from what he writes to what he reads.
  std::mutex& in_use() { return in_use_; }

 private:
  std::mutex in_use_;
  std::mutex mutex_;  // for what follows
  std::map<std::pair<std::string, std::size_t>, std::weak_ptr<Buffer>> buffers_;
};

// Rows (tokens) that a program takes at once.
struct ProgramPart {
  const ProgramRecord* program;
  std::int64_t first;
  std::int64_t count;
};
// Which of those programs so many rows take: the smallest that takes all that are left, or else the
// largest. `position`: of the first, where each row has one. None if there is no program for some.
std::vector<ProgramPart> parts_of(std::span<const ProgramRecord* const> programs, std::int64_t rows,
                                  std::optional<std::int64_t> position = {});
std::int64_t dispatches_of(std::span<const ProgramPart> parts);

class OperatorPrograms {
 public:
  // `node`: that is on the array. Throws DeviceError: kArtifact if the folder has no programs for
  // it, kMemory.
  OperatorPrograms(const Node& node, std::shared_ptr<CompiledDesigns> designs,
                   std::shared_ptr<SharedBuffers> shared, const HostCompute& host,
                   std::int64_t threshold);

  // Programs for the size that is number `kind` in ArrayOperator::sizes.
  std::span<const ProgramRecord* const> records(std::size_t kind = 0) const {
    return records_[kind];
  }
  // Whether so many multiply-adds are worth so many dispatches.
  bool is_worth(std::int64_t multiply_adds, std::int64_t dispatches) const {
    return dispatches > 0 && multiply_adds / dispatches >= threshold_;
  }
  const ArrayOperator& description() const { return description_; }
  // The keys and values of a call; null if the programs have none.
  Buffer* cache() const { return cache_.get(); }

  // To be held during a run, which it begins. Throws DeviceFailed as CompiledDesigns::begin_run.
  [[nodiscard]] std::unique_lock<std::mutex> begin() const;
  // The first of `given`, then the program, then `made`; rows: for messages. Throws DeviceFailed.
  void run(const ProgramRecord* record, std::span<const float> given, std::span<float> made,
           std::int64_t position = 0) const;
  // A product's programs, as many as the rows take: made[rows][columns] of given[rows][inner].
  void multiply(const float* given, std::int64_t rows, float* made) const;

 private:
  std::string name_;
  ArrayOperator description_;
  std::shared_ptr<CompiledDesigns> designs_;
  std::shared_ptr<SharedBuffers> shared_;
  std::int64_t threshold_;
  std::vector<std::vector<const ProgramRecord*>> records_;
  std::vector<ProgramBuffers> buffers_;
  std::shared_ptr<Buffer> cache_;
  mutable std::vector<Program> programs_;
};

}  // namespace flownpu::npu
