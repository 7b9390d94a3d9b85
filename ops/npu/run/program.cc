// SPDX-License-Identifier: Apache-2.0
#include "ops/npu/run/program.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "ops/error.h"
#include "ops/formats/numbers.h"
#include "ops/npu/nodes/lowered_node.h"
#include "ops/system/machine_limits.h"

namespace flownpu::npu {
namespace {

std::uint16_t* elements(Buffer& buffer, std::size_t offset) {
  return reinterpret_cast<std::uint16_t*>(buffer.bytes().data() + offset);
}

// Memory that no array reaches, and of which there is one copy only.
class HostMemory final : public Buffer {
 public:
  explicit HostMemory(std::size_t bytes) : bytes_(bytes) {}
  std::span<std::byte> bytes() override { return bytes_; }
  void to_device(std::size_t /*offset*/, std::size_t /*bytes*/) override {}
  void to_host(std::size_t /*offset*/, std::size_t /*bytes*/) override {}

 private:
  std::vector<std::byte> bytes_;
};

// The largest use of each buffer, by name. A buffer with several roles is scratch, which host and
// array reach.
std::map<std::string, ProgramBuffer> largest(std::span<const ProgramRecord* const> programs) {
  std::map<std::string, ProgramBuffer> found;
  for (const ProgramRecord* program : programs) {
    for (const ProgramBuffer& buffer : program->buffers) {
      const auto [entry, added] = found.try_emplace(buffer.name, buffer);
      ProgramBuffer& known = entry->second;
      const BufferRole role =
          added || known.role == buffer.role ? buffer.role : BufferRole::kScratch;
      if (known.bytes < buffer.bytes) known = buffer;
      known.role = role;
    }
  }
  return found;
}

// The array's buffers lie in the machine's main memory.
void require_memory(const std::map<std::string, ProgramBuffer>& buffers) {
  const std::size_t machine = machine_memory();
  std::size_t left = machine;
  for (const auto& [name, buffer] : buffers) {
    if (buffer.bytes > left) {
      fail_device(Failure::kMemory, "expected programs whose buffers fit the ", machine >> 20,
                  " MB of this machine, got ", name, " of ", buffer.bytes >> 20, " MB where ",
                  left >> 20, " MB are left by others: build them for a shorter context");
    }
    left -= buffer.bytes;
  }
}

std::unique_ptr<Buffer> make_scratch(Runtime& runtime, const ProgramBuffer& record) {
  std::unique_ptr<Buffer> buffer = runtime.allocate(record.bytes);
  if (record.line > 0) {
    std::uint16_t* values = elements(*buffer, 0);
    for (std::size_t at = record.one; at < record.bytes / kBFloat16Bytes; at += record.line)
      values[at] = to_bfloat16(1.0F);
  }
  buffer->to_device(
      0, record.bytes);  // Zeros and ones, because uninitialised memory need not hold numbers.
  return buffer;
}

void require_values(std::size_t values, const RowsRecord& rows, const ProgramRecord& program) {
  if (values <= rows.rows() * rows.columns) return;
  fail("[FlowNPU] expected at most ", rows.rows(), " rows of ", rows.columns,
       " values of the program to ", program.kind, ", got ", values, " values");
}

}  // namespace

ProgramBuffers::ProgramBuffers(Runtime& runtime, std::span<const ProgramRecord* const> programs,
                               const Node& node, const Makers& makers) {
  const std::map<std::string, ProgramBuffer> uses = largest(programs);
  require_memory(uses);
  for (const auto& [name, record] : uses) {
    if (record.role == BufferRole::kCache) {
      cache_bytes_ = std::max(cache_bytes_, record.bytes);
      continue;
    }
    std::shared_ptr<Buffer>& buffer = buffers_[name];
    if (const auto maker = makers.find(name); maker != makers.end()) {
      buffer = maker->second(record.bytes);
    } else if (record.role == BufferRole::kConstant) {
      buffer = upload(runtime, packed(node, name, record.bytes));
    } else if (record.role == BufferRole::kHost) {
      buffer = std::make_unique<HostMemory>(record.bytes);
    } else {
      buffer = make_scratch(runtime, record);
    }
  }
}

Buffer* ProgramBuffers::find(const std::string& name) const {
  const auto found = buffers_.find(name);
  return found == buffers_.end() ? nullptr : found->second.get();
}

Program::Program(std::shared_ptr<CompiledDesigns> designs, const ProgramRecord& record,
                 const ProgramBuffers& buffers, const HostCompute& host)
    : designs_(std::move(designs)),
      record_(&record),
      given_(buffers.find(record.buffers[record.given.view.buffer].name)),
      made_(buffers.find(record.buffers[record.made.view.buffer].name)),
      given_has_ones_(record.buffers[record.given.view.buffer].line > 0),
      host_(host) {
  for (const DispatchRecord& dispatch : record.dispatches) {
    std::vector<Step>& steps = dispatches_.emplace_back();
    // A call that a dispatch makes at several positions has words for each.
    std::map<const PreparedCall*, std::map<std::int64_t, std::size_t>> slots;
    for (const StepRecord& from : dispatch.steps) {
      Step& step = steps.emplace_back();
      if (dispatch.host) {
        std::unique_ptr<HostOperator>& call = host_calls_[from.call];
        if (call == nullptr)
          call = make_host_operator(designs_->artifacts().host_call(from.call), from.label);
        step.host = call.get();
      } else {
        std::unique_ptr<PreparedCall>& call = calls_[from.call];
        if (call == nullptr)
          call = std::make_unique<PreparedCall>(*designs_, designs_->artifacts().call(from.call));
        step.call = call.get();
        auto& offsets = slots[step.call];
        step.slot = offsets.try_emplace(from.offset, offsets.size()).first->second;
      }
      step.offset = from.offset;
      if (from.choices) {
        const ProgramBuffer& buffer = record.buffers[*from.choices];
        if (dispatch.host || buffer.bytes < step.call->choices() * sizeof(std::int32_t))
          fail("[FlowNPU] ", from.label, ": expected a call on an array whose choices fit ",
               buffer.name);
        step.choices = buffers.find(buffer.name);
      }
      step.label = &from.label;
      for (const ViewRecord& view : from.views) {
        const ProgramBuffer& buffer = record.buffers[view.buffer];
        step.arguments.push_back({buffers.find(buffer.name), view.offset, view.bytes,
                                  buffer.role == BufferRole::kConstant});
      }
    }
  }
}

// The rest of a row's line becomes zero, or keeps its ones if the buffer has ones.
void Program::write(std::span<const float> values) {
  const RowsRecord& rows = record_->given;
  require_values(values.size(), rows, *record_);
  given_rows_ = (values.size() + rows.columns - 1) / rows.columns;
  std::uint16_t* line = elements(*given_, rows.view.offset);
  for (std::size_t row = 0; row < rows.rows(); ++row, line += rows.line) {
    const std::span<const float> given =
        values.subspan(std::min(row * rows.columns, values.size()));
    const std::size_t count = std::min(given.size(), rows.columns);
    std::ranges::transform(given.first(count), line, to_bfloat16);
    const std::size_t end = given_has_ones_ ? rows.columns : rows.line;
    std::fill(line + count, line + end, 0);
  }
  given_->to_device(rows.view.offset, rows.view.bytes);
}

std::vector<std::int64_t> Program::choices_of(const Step& step) {
  const auto* numbers = reinterpret_cast<const std::int32_t*>(step.choices->bytes().data());
  return {numbers, numbers + step.call->choices()};
}

void Program::run(std::int64_t position, const std::string& where, Buffer* cache) {
  const auto is_cache = [](const ProgramBuffer& buffer) {
    return buffer.role == BufferRole::kCache;
  };
  if (cache == nullptr && std::ranges::any_of(record_->buffers, is_cache))
    fail("[FlowNPU] expected a program to ", record_->kind, " without a cache, and it has one");
  for (const std::vector<Step>& steps : dispatches_) {
    std::vector<Call> calls;
    // Calls have spans of these, so they must not move.
    std::vector<std::vector<View>> arguments;
    arguments.reserve(steps.size());
    for (const Step& step : steps) {
      std::vector<View>& views = arguments.emplace_back(step.arguments);
      for (View& view : views) {
        if (view.buffer == nullptr) view.buffer = cache;
      }
      const std::string name = *step.label + where;
      const std::int64_t first = position + step.offset;
      if (step.host != nullptr) {
        designs_->compute(name, first, [&] { step.host->run(host_, views, first, given_rows_); });
        continue;
      }
      // Words that follow choices do not follow the position.
      Sequence* const sequence = step.choices == nullptr
                                     ? step.call->at(first, step.slot)
                                     : step.call->at(0, step.slot, choices_of(step));
      calls.push_back({.name = name,
                       .sequence = sequence,
                       .arguments = views,
                       .family = step.call->file(),
                       .position = first});
    }
    if (!calls.empty()) designs_->dispatch(steps.front().call->array(), calls);
  }
}

void Program::read(std::span<float> values) const {
  const RowsRecord& rows = record_->made;
  require_values(values.size(), rows, *record_);
  made_->to_host(rows.view.offset, rows.view.bytes);
  const std::uint16_t* line = elements(*made_, rows.view.offset);
  for (; !values.empty(); line += rows.line) {
    const std::size_t count = std::min(rows.columns, values.size());
    std::transform(line, line + count, values.begin(), from_bfloat16);
    values = values.subspan(count);
  }
}

}  // namespace flownpu::npu
