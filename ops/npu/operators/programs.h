// SPDX-License-Identifier: Apache-2.0
// OperatorPrograms: the programs of a node by itself, bound to its constants, and the choice among
// them for a run.
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

// Buffers that single operators share, because they run one after the other: activations, results,
// dequantised weights, keys and values of a call.
class SharedBuffers {
 public:
  // The buffer of this name and size: another operator's, or a new one with zeros.
  std::shared_ptr<Buffer> get(Runtime& runtime, const std::string& name, std::size_t bytes);
  // Makers for all buffers of the programs that are scratch.
  ProgramBuffers::Makers makers(Runtime& runtime, std::span<const ProgramRecord* const> programs);

  // A user of the buffers holds this lock from the first write to the last read.
  std::mutex& in_use() { return in_use_; }

 private:
  std::mutex in_use_;
  std::mutex mutex_;  // guards buffers_
  std::map<std::pair<std::string, std::size_t>, std::weak_ptr<Buffer>> buffers_;
};

// Rows (tokens) of a run that go through a program at once.
struct ProgramPart {
  const ProgramRecord* program;
  std::int64_t first;
  std::int64_t count;
};
// Divides `rows` rows among the programs, which are sorted by tokens. Each part takes the smallest
// program for all remaining rows, else the largest. `position`: the first row's, if rows have
// positions; these must fit the programs' context. Empty if some rows have no program.
std::vector<ProgramPart> parts_of(std::span<const ProgramRecord* const> programs, std::int64_t rows,
                                  std::optional<std::int64_t> position = {});
// Dispatches to an array that the parts take.
std::int64_t dispatches_of(std::span<const ProgramPart> parts);

class OperatorPrograms {
 public:
  // `node`: one that is on the array. Throws DeviceError: kArtifact if the folder has no programs
  // for it, kMemory.
  OperatorPrograms(const Node& node, std::shared_ptr<CompiledDesigns> designs,
                   std::shared_ptr<SharedBuffers> shared, const HostCompute& host,
                   std::int64_t threshold);

  // The programs for element `kind` of ArrayOperator::sizes.
  std::span<const ProgramRecord* const> records(std::size_t kind = 0) const {
    return records_[kind];
  }
  // Whether so many multiply-adds are worth so many dispatches; never worth none.
  bool is_worth(std::int64_t multiply_adds, std::int64_t dispatches) const {
    return dispatches > 0 && multiply_adds / dispatches >= threshold_;
  }
  const ArrayOperator& description() const { return description_; }
  // The buffer for the keys and values of a call; null if the programs have no cache.
  Buffer* cache() const { return cache_.get(); }

  // Begins a run: the lock is to be held until it ends. Throws DeviceFailed as
  // CompiledDesigns::begin_run() does.
  [[nodiscard]] std::unique_lock<std::mutex> begin() const;
  // Writes `given`, runs the program from `position` on, and reads `made`. Throws DeviceFailed.
  void run(const ProgramRecord* record, std::span<const float> given, std::span<float> made,
           std::int64_t position = 0) const;
  // Multiplies by a product's weight, with as many programs as the rows take: given [rows, inner],
  // made [rows, columns].
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
