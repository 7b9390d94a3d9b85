// SPDX-License-Identifier: Apache-2.0
#include "ops/gpu/opencl/progress.h"

#include <utility>

#include "ops/system/variables.h"

namespace flownpu::gpu {
namespace {

// How long none of kCommandsOfMark kernels may end. Those of a GPU take 64 x 27 ms if all are the
// largest product of a 4B model for a chunk of 256 tokens (27 G operations, at 1 Tops), and Linux's
// amdgpu resets a queue after 60 s, whose error says more than ours: twice that. A CPU's OpenCL
// has a hundredth of such a GPU's operations a second, and nobody resets it.
constexpr std::chrono::seconds kLimitOfGpu{120};
constexpr std::chrono::seconds kLimitOfCpu{1200};

}  // namespace

std::chrono::milliseconds time_limit(const DeviceFacts& facts) {
  return seconds_of(kTimeVariable, facts.is_software() ? kLimitOfCpu : kLimitOfGpu);
}

void Progress::reach(cl::Int status) {
  const std::lock_guard lock(mutex_);
  ++reached_;
  if (error_ == cl::kComplete && status < 0) error_ = status;
  changed_.notify_all();
}

bool Progress::wait(std::int64_t marks, std::chrono::milliseconds limit) {
  std::unique_lock lock(mutex_);
  while (reached_ < marks) {
    const std::int64_t before = reached_;
    if (!changed_.wait_for(lock, limit, [&] { return reached_ > before; })) return false;
  }
  return true;
}

std::int64_t Progress::reached() const {
  const std::lock_guard lock(mutex_);
  return reached_;
}

cl::Int Progress::take_error() {
  const std::lock_guard lock(mutex_);
  return std::exchange(error_, cl::kComplete);
}

}  // namespace flownpu::gpu
