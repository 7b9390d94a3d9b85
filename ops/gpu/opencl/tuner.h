// SPDX-License-Identifier: Apache-2.0
// Tuner: which of several ways to launch the same work is the fastest on a device, measured once
// and kept beside compiled kernels.
#pragma once

#include <cstddef>
#include <functional>
#include <map>
#include <string>

#include "ops/gpu/opencl/context.h"

namespace flownpu::gpu {

// In the environment: 1 or 0, whether anything is measured. Without it only GPUs are: on a CPU, of
// which other programs have a part, times say little.
inline constexpr const char* kTuneVariable = "FLOWNPU_GPU_TUNE";

class Tuner {
 public:
  // `context` must outlive it, and its mutex be held when it measures. Throws Error for a variable
  // that is neither.
  explicit Tuner(Context& context);

  bool measures() const { return measures_; }
  // The number of the fastest of so many ways, 0 if none is measured. `what`: all that the times
  // depend on, but for device and driver. `launch`: launches one kernel, in that way. Throws
  // OpenClError.
  std::size_t fastest(const std::string& what, std::size_t ways,
                      const std::function<void(std::size_t)>& launch);

 private:
  double seconds_of(const std::function<void()>& launch);

  Context& context_;
  bool measures_;
  std::map<std::string, std::size_t> known_;
};

}  // namespace flownpu::gpu
