// SPDX-License-Identifier: Apache-2.0
#include "ops/gpu/opencl/progress.h"

#include <utility>

namespace flownpu::gpu {

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
