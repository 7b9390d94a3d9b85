// SPDX-License-Identifier: Apache-2.0
// ObservedRun: tells who looks on at a run (ops/dispatch_observer.h) which kernels it launched.
#pragma once

#include <string>

#include "ops/dispatch_observer.h"
#include "ops/gpu/opencl/context.h"

namespace flownpu::gpu {

// In the place of an array.
inline constexpr const char* kOpenCl = "opencl";

// Lives as long as the run, under the context's mutex. If nobody looks on it does nothing.
class ObservedRun {
 public:
  // `where`: said with each kernel, "position 70"; may be empty.
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
