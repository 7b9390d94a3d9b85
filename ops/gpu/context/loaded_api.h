// SPDX-License-Identifier: Apache-2.0
// The functions of an API whose library is loaded when the process first asks for them. It stays
// loaded, because implementations have threads of their own.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <optional>

#include "ops/gpu/context/failure.h"
#include "ops/system/forks.h"

namespace flownpu::gpu {

template <typename Functions>
class LoadedApi {
 public:
  // `load` throws GpuError; a later call tries again.
  explicit LoadedApi(Functions (*load)()) : load_(load) {}

  // Throws GpuError (kForked), too.
  const Functions& functions() {
    check_own();
    const std::lock_guard lock(mutex_);
    if (!loaded_) {
      loaded_ = load_();
      loaded_in_ = forks();
    }
    return *loaded_;
  }
  // Whether this process was forked from one that had loaded the API. The child lacks the threads
  // of implementations, so it must not call the API, and leaves the parent's objects as they are.
  bool is_parents() const { return loaded_in_ != kNotLoaded && loaded_in_ != forks(); }
  // Throws GpuError (kForked) if it was.
  void check_own() const {
    if (is_parents()) throw GpuError(Failure::kForked, forked_text("gpu"));
  }

 private:
  static constexpr std::int64_t kNotLoaded = -1;

  Functions (*load_)();
  std::mutex mutex_;
  std::optional<Functions> loaded_;
  std::atomic<std::int64_t> loaded_in_ = kNotLoaded;  // the count of forks() of that process
};

}  // namespace flownpu::gpu
