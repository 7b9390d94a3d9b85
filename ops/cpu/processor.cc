// SPDX-License-Identifier: Apache-2.0
#include "ops/cpu/processor.h"

#include <cstdint>

#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

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

bool may_use_tiles() noexcept {
#if defined(__x86_64__) && defined(__linux__)
  // <asm/prctl.h> has the request since Linux 5.16, and no header the state's number.
  constexpr std::int64_t kAskForState = 0x1023;  // ARCH_REQ_XCOMP_PERM
  constexpr std::int64_t kTileData = 18;         // XFEATURE_XTILE_DATA
  return __builtin_cpu_supports("amx-int8") != 0 &&
         syscall(SYS_arch_prctl, kAskForState, kTileData) == 0;
#else
  return false;
#endif
}

}  // namespace flownpu::cpu
