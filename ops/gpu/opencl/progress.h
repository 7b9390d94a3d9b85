// SPDX-License-Identifier: Apache-2.0
// How far a queue has come: its driver tells by callbacks of marks that lie between commands.
// OpenCL's own waits have no limit, and a kernel that never ends would hold a thread for ever.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>

#include "ops/gpu/opencl/abi.h"
#include "ops/gpu/opencl/devices.h"

namespace flownpu::gpu {

// Commands between two marks, one of which costs some microseconds: one to four marks a token.
inline constexpr std::int64_t kCommandsOfMark = 64;

// Seconds for which none of the kernels that were launched may end, in the environment.
inline constexpr const char* kTimeVariable = "FLOWNPU_GPU_TIMEOUT";

// That limit, else the device's. Throws Error for what is no number of seconds.
std::chrono::milliseconds time_limit(const DeviceFacts& facts);

class Progress {
 public:
  // A mark was reached, with kComplete or the error of what lies before it. On any thread.
  void reach(cl::Int status);
  // Waits until so many marks have been reached. False if for `limit` none was.
  bool wait(std::int64_t marks, std::chrono::milliseconds limit);
  std::int64_t reached() const;
  // The first error that a mark ended with since this was last asked, or kComplete.
  cl::Int take_error();

 private:
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::int64_t reached_ = 0;
  cl::Int error_ = cl::kComplete;
};

}  // namespace flownpu::gpu
