// SPDX-License-Identifier: Apache-2.0
#include "ops/npu/program.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "ops/error.h"
#include "ops/npu/lowered_node.h"
#include "ops/number_formats.h"

namespace flownpu::npu {
namespace {

std::uint16_t* elements(Buffer& buffer, std::size_t offset) {
  return reinterpret_cast<std::uint16_t*>(buffer.bytes().data() + offset);
}

// The largest use of each name.
std::map<std::string, ProgramBuffer> largest(std::span<const ProgramRecord* const> programs) {
  std::map<std::string, ProgramBuffer> found;
  for (const ProgramRecord* program : programs) {
    for (const ProgramBuffer& buffer : program->buffers) {
      ProgramBuffer& known = found[buffer.name];
      if (known.bytes <= buffer.bytes) known = buffer;
    }
  }
  return found;
}

// The array's buffers lie in the machine's own memory.
void require_memory(const std::map<std::string, ProgramBuffer>& buffers) {
  const auto machine = static_cast<std::size_t>(sysconf(_SC_PHYS_PAGES)) *
                       static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  std::size_t left = machine;
  for (const auto& [name, buffer] : buffers) {
    if (buffer.bytes > left) {
      throw DeviceError(Failure::kMemory,
                        "[FlowNPU] expected programs whose buffers fit the " +
                            std::to_string(machine >> 20) + " MB of this machine, got " + name +
                            " of " + std::to_string(buffer.bytes >> 20) + " MB where " +
                            std::to_string(left >> 20) +
                            " MB are left by others: build them for a shorter context");
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
  buffer->to_device(0, record.bytes);  // Numbers, which uninitialised memory may not be.
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
                 const ProgramBuffers& buffers)
    : designs_(std::move(designs)),
      record_(&record),
      given_(buffers.find(record.buffers[record.given.view.buffer].name)),
      made_(buffers.find(record.buffers[record.made.view.buffer].name)),
      given_has_ones_(record.buffers[record.given.view.buffer].line > 0) {
  for (const std::vector<StepRecord>& dispatch : record.dispatches) {
    std::vector<Step>& steps = dispatches_.emplace_back();
    for (const StepRecord& step : dispatch) {
      std::unique_ptr<PreparedCall>& call = calls_[step.call];
      if (call == nullptr) {
        call = std::make_unique<PreparedCall>(*designs_, designs_->artifacts().call(step.call));
      }
      std::vector<View> arguments;
      for (const ViewRecord& view : step.views)
        arguments.push_back(
            {buffers.find(record.buffers[view.buffer].name), view.offset, view.bytes});
      steps.push_back({call.get(), std::move(arguments), &step.label});
    }
  }
}

// What lies between the columns of two rows is zeros, or as the buffer began where it has ones.
void Program::write(std::span<const float> values) {
  const RowsRecord& rows = record_->given;
  require_values(values.size(), rows, *record_);
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

void Program::run(std::int64_t position, const std::string& where, Buffer* cache) {
  const auto is_cache = [](const ProgramBuffer& buffer) {
    return buffer.role == BufferRole::kCache;
  };
  if (cache == nullptr && std::ranges::any_of(record_->buffers, is_cache))
    fail("[FlowNPU] expected a program to ", record_->kind, " without a cache, and it has one");
  std::vector<Call> calls;
  // Calls hold spans of these.
  std::vector<std::vector<View>> arguments;
  for (const std::vector<Step>& dispatch : dispatches_) {
    calls.clear();
    arguments.clear();
    arguments.reserve(dispatch.size());
    for (const Step& step : dispatch) {
      std::vector<View>& views = arguments.emplace_back(step.arguments);
      for (View& view : views) {
        if (view.buffer == nullptr) view.buffer = cache;
      }
      calls.push_back({.name = *step.label + where,
                       .sequence = step.call->at(position),
                       .arguments = views,
                       .family = step.call->file(),
                       .position = position});
    }
    designs_->dispatch(dispatch.front().call->array(), calls);
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
