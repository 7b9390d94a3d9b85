// SPDX-License-Identifier: Apache-2.0
#include "ops/system/processors.h"

#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace flownpu {

std::vector<int> allowed_processors() {
  std::vector<int> processors;
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) != 0) return processors;
  for (int processor = 0; processor < CPU_SETSIZE; ++processor) {
    if (CPU_ISSET(processor, &set)) processors.push_back(processor);
  }
  return processors;
}

int current_processor() { return sched_getcpu(); }

void keep_on(std::thread& thread, std::span<const Processor> processors, std::size_t first,
             std::size_t step) {
  cpu_set_t set;
  CPU_ZERO(&set);
  for (std::size_t i = first; i < processors.size(); i += step) CPU_SET(processors[i].number, &set);
  pthread_setaffinity_np(thread.native_handle(), sizeof(set), &set);
}

std::int64_t second_level_cache_bytes() {
  const std::int64_t bytes = sysconf(_SC_LEVEL2_CACHE_SIZE);
  return bytes > 0 ? bytes : kLeastCacheBytes;
}

bool ask_for_tiles() noexcept {
#if defined(__x86_64__)
  // <asm/prctl.h> only has the request since Linux 5.16, and no header has the state's number.
  constexpr std::int64_t kAskForState = 0x1023;  // ARCH_REQ_XCOMP_PERM
  constexpr std::int64_t kTileData = 18;         // XFEATURE_XTILE_DATA
  return syscall(SYS_arch_prctl, kAskForState, kTileData) == 0;
#else
  return false;
#endif
}

}  // namespace flownpu
