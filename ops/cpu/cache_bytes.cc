// SPDX-License-Identifier: Apache-2.0
#include "ops/cpu/cache_bytes.h"

#if defined(__linux__)
#include <unistd.h>
#endif

namespace flownpu::cpu {

std::int64_t cache_bytes() {
#if defined(__linux__) && defined(_SC_LEVEL2_CACHE_SIZE)
  if (const std::int64_t bytes = sysconf(_SC_LEVEL2_CACHE_SIZE); bytes > 0) return bytes;
#endif
  return 512 * 1024;
}

}  // namespace flownpu::cpu
