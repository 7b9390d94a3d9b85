// SPDX-License-Identifier: Apache-2.0
// Tuner: measures once which of several launches of the same work is fastest on a device. The
// result is kept beside compiled kernels.
#pragma once

#include <cstddef>
#include <functional>
#include <map>
#include <string>

#include "ops/gpu/context/context.h"

namespace flownpu::gpu {

// Environment variable: 1 or 0, whether anything is measured. Unset: on GPUs only. On a CPU, which
// other programs share, times say little.
inline constexpr const char* kTuneVariable = "FLOWNPU_GPU_TUNE";

class Tuner {
 public:
  // `context` must outlive it, and its mutex be held by callers of fastest(). Throws Error if
  // kTuneVariable is set to something else.
  explicit Tuner(Context& context);

  bool measures() const { return measures_; }
  // The number of the fastest of so many ways; 0 if nothing is measured. `what`: all that the times
  // depend on, except device and driver, as a key. `launch`: launches one kernel in the given way.
  // Throws GpuError.
  std::size_t fastest(const std::string& what, std::size_t ways,
                      const std::function<void(std::size_t)>& launch);

 private:
  // Median time of a kernel, by the device's clock.
  double seconds_of(const std::function<void()>& launch);

  Context& context_;
  bool measures_;
  std::map<std::string, std::size_t> known_;
};

}  // namespace flownpu::gpu
