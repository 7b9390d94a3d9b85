// SPDX-License-Identifier: Apache-2.0
#include "ops/system/machine_limits.h"

#include <algorithm>
#include <thread>

#include "ops/system/processors.h"

namespace flownpu {

int usable_processors(const std::filesystem::path& root) {
  auto allowed = static_cast<int>(allowed_processors().size());
  if (allowed == 0) allowed = static_cast<int>(std::thread::hardware_concurrency());
  if (const auto quota = processor_quota(root))
    allowed = static_cast<int>(std::min<double>(allowed, quota->value));
  return std::max(allowed, 1);
}

}  // namespace flownpu
