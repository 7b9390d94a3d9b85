// SPDX-License-Identifier: Apache-2.0
#include "ops/cpu/processor.h"

namespace flownpu::cpu {
namespace {

bool is_intel() noexcept {
#if defined(__x86_64__)
  __builtin_cpu_init();
  return __builtin_cpu_is("intel") != 0;
#else
  return false;
#endif
}

}  // namespace

const bool kFetchIntoL2 = is_intel();

}  // namespace flownpu::cpu
