// SPDX-License-Identifier: Apache-2.0
// ObservedRun: tells the observer of a run (ops/dispatch_observer.h) which kernels it launched.
#pragma once

#include <string>

#include "ops/dispatch_observer.h"
#include "ops/gpu/context/context.h"

namespace flownpu::gpu {

// Dispatch::array of kernels.
inline constexpr const char* kGpuArray = "gpu";

// Lives as long as the run, while the context's mutex is held. Without an observer it does nothing.
class ObservedRun {
 public:
  // `where`: what is appended to each kernel's name, such as "position 70"; may be empty.
  explicit ObservedRun(Context& context, const std::string& where = "");
  ~ObservedRun();
  ObservedRun(const ObservedRun&) = delete;
  ObservedRun& operator=(const ObservedRun&) = delete;

 private:
  void report();

  Context& context_;
  std::string where_;
  DispatchObserver* observer_;
  bool took_times_;
  Counts before_;
};

}  // namespace flownpu::gpu
