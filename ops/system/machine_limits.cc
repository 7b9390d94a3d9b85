// SPDX-License-Identifier: Apache-2.0
#include "ops/system/machine_limits.h"

#include <algorithm>
#include <thread>

namespace flownpu {

int usable_processors(const std::filesystem::path& root, const std::vector<int>& allowed) {
  auto usable = static_cast<int>(computing_processors(describe_processors(allowed, root)).size());
  if (usable == 0) usable = static_cast<int>(std::thread::hardware_concurrency());
  if (const auto quota = processor_quota(root))
    usable = static_cast<int>(std::min<double>(usable, quota->value));
  return std::max(usable, 1);
}

}  // namespace flownpu
