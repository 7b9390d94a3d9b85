// SPDX-License-Identifier: Apache-2.0
// How far a queue has come: its driver tells by callbacks of marks that lie between commands.
// OpenCL's own waits have no limit, and a kernel that never ends would hold a thread for ever.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>

#include "ops/gpu/opencl/abi.h"

namespace flownpu::gpu {

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
