// SPDX-License-Identifier: Apache-2.0
#include "ops/npu/operators/programs.h"

#include <algorithm>
#include <utility>

#include "ops/error.h"
#include "ops/npu/nodes/lowered_node.h"

namespace flownpu::npu {

std::shared_ptr<Buffer> SharedBuffers::get(Runtime& runtime, const std::string& name,
                                           std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  std::weak_ptr<Buffer>& known = buffers_[{name, bytes}];
  std::shared_ptr<Buffer> buffer = known.lock();
  if (buffer == nullptr) {
    buffer = runtime.allocate(bytes);
    buffer->to_device(0, bytes);  // Zeros, because the array's memory need not hold numbers.
    known = buffer;
  }
  return buffer;
}

ProgramBuffers::Makers SharedBuffers::makers(Runtime& runtime,
                                             std::span<const ProgramRecord* const> programs) {
  ProgramBuffers::Makers makers;
  for (const ProgramRecord* program : programs) {
    for (const ProgramBuffer& buffer : program->buffers) {
      if (buffer.role != BufferRole::kScratch) continue;
      makers[buffer.name] = [this, &runtime, name = buffer.name](std::size_t bytes) {
        return get(runtime, name, bytes);
      };
    }
  }
  return makers;
}

std::vector<ProgramPart> parts_of(std::span<const ProgramRecord* const> programs, std::int64_t rows,
                                  std::optional<std::int64_t> position) {
  std::vector<ProgramPart> parts;
  for (std::int64_t first = 0; first < rows; first += parts.back().count) {
    const std::int64_t begin = position ? *position + first : 0;
    const ProgramRecord* best = nullptr;
    for (const ProgramRecord* program : programs) {
      if (program->context > 0 && begin + program->tokens > program->context) break;
      best = program;
      if (program->tokens >= rows - first) break;
    }
    if (best == nullptr) return {};
    parts.push_back({best, first, std::min(rows - first, best->tokens)});
  }
  return parts;
}

std::int64_t dispatches_of(std::span<const ProgramPart> parts) {
  std::int64_t dispatches = 0;
  for (const ProgramPart& part : parts)
    dispatches += static_cast<std::int64_t>(part.program->array_dispatches());
  return dispatches;
}

OperatorPrograms::OperatorPrograms(const Node& node, std::shared_ptr<CompiledDesigns> designs,
                                   std::shared_ptr<SharedBuffers> shared, const HostCompute& host,
                                   std::int64_t threshold)
    : name_(to_string(node)),
      description_(describe_operator(node)),
      designs_(std::move(designs)),
      shared_(std::move(shared)),
      threshold_(threshold) {
  std::vector<const ProgramRecord*> all;
  for (const Node& sizes : description_.sizes) {
    records_.push_back(designs_->artifacts().programs(sizes.op_type, sizes));
    all.insert(all.end(), records_.back().begin(), records_.back().end());
  }
  // Programs of one kind are enough: runs that need the other kind are the host's.
  if (all.empty())
    designs_->artifacts().require(description_.sizes.front().op_type, description_.sizes.front());
  Runtime& runtime = designs_->runtime();
  buffers_.emplace_back(runtime, all, node, shared_->makers(runtime, all));
  if (const std::size_t bytes = buffers_.front().cache_bytes(); bytes > 0)
    cache_ = shared_->get(runtime, "cache", bytes);
  for (const ProgramRecord* record : all)
    programs_.emplace_back(designs_, *record, buffers_.front(), host);
}

std::unique_lock<std::mutex> OperatorPrograms::begin() const {
  std::unique_lock lock(shared_->in_use());
  designs_->begin_run();
  return lock;
}

void OperatorPrograms::run(const ProgramRecord* record, std::span<const float> given,
                           std::span<float> made, std::int64_t position) const {
  const auto program = std::ranges::find(
      programs_, record, [](const Program& candidate) { return &candidate.record(); });
  program->write(given);
  program->run(position, ", " + name_, cache_.get());
  program->read(made);
}

void OperatorPrograms::multiply(const float* given, std::int64_t rows, float* made) const {
  const Node& sizes = description_.sizes.front();
  const std::int64_t inner = sizes.required_integer("inner");
  const std::int64_t columns = sizes.required_integer("columns");
  for (const auto& [program, first, count] : parts_of(records(), rows)) {
    run(program, {given + first * inner, static_cast<std::size_t>(count * inner)},
        {made + first * columns, static_cast<std::size_t>(count * columns)});
  }
}

}  // namespace flownpu::npu
