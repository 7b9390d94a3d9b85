// SPDX-License-Identifier: Apache-2.0
#include "ops/system/machine_limits.h"

#include <windows.h>

namespace flownpu {

std::optional<GroupLimit<double>> processor_quota(const std::filesystem::path& /*root*/) {
  return std::nullopt;
}

std::optional<GroupLimit<std::int64_t>> memory_limit(const std::filesystem::path& /*root*/) {
  return std::nullopt;
}

std::size_t machine_memory() {
  MEMORYSTATUSEX status{};
  status.dwLength = sizeof(status);
  GlobalMemoryStatusEx(&status);
  return status.ullTotalPhys;
}

}  // namespace flownpu
