// SPDX-License-Identifier: Apache-2.0
// SharedBuffers: the buffers that operators by themselves share, since one runs after the other:
// activations, results, dequantised weights, keys and values of a call.
#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "ops/npu/driver/runtime.h"
#include "ops/npu/run/program.h"

namespace flownpu::npu {

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

}  // namespace flownpu::npu
