// SPDX-License-Identifier: Apache-2.0
#include "ops/npu/operators/shared_buffers.h"

namespace flownpu::npu {

std::shared_ptr<Buffer> SharedBuffers::get(Runtime& runtime, const std::string& name,
                                           std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  std::weak_ptr<Buffer>& known = buffers_[{name, bytes}];
  std::shared_ptr<Buffer> buffer = known.lock();
  if (buffer == nullptr) {
    buffer = runtime.allocate(bytes);
    buffer->to_device(0, bytes);  // Numbers, which what the array has there may not be.
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

}  // namespace flownpu::npu
