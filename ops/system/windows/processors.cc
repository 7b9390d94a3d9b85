// SPDX-License-Identifier: Apache-2.0
#include "ops/system/processors.h"

#include <windows.h>

#include <limits>

namespace flownpu {
namespace {

constexpr int kGroupProcessors = std::numeric_limits<DWORD_PTR>::digits;

}  // namespace

std::vector<int> allowed_processors() {
  std::vector<int> processors;
  DWORD_PTR of_process = 0;
  DWORD_PTR of_system = 0;
  if (GetProcessAffinityMask(GetCurrentProcess(), &of_process, &of_system) == 0) return processors;
  for (int processor = 0; processor < kGroupProcessors; ++processor) {
    if ((of_process >> processor & 1) != 0) processors.push_back(processor);
  }
  return processors;
}

int current_processor() { return static_cast<int>(GetCurrentProcessorNumber()); }

void keep_on(std::thread& thread, std::span<const Processor> processors, std::size_t first,
             std::size_t step) {
  DWORD_PTR mask = 0;
  for (std::size_t i = first; i < processors.size(); i += step)
    mask |= DWORD_PTR{1} << processors[i].number;
  SetThreadAffinityMask(thread.native_handle(), mask);
}

std::int64_t second_level_cache_bytes() {
  DWORD bytes = 0;
  GetLogicalProcessorInformation(nullptr, &bytes);
  std::vector<SYSTEM_LOGICAL_PROCESSOR_INFORMATION> found(
      bytes / sizeof(SYSTEM_LOGICAL_PROCESSOR_INFORMATION));
  if (GetLogicalProcessorInformation(found.data(), &bytes) == 0) return kLeastCacheBytes;
  for (const SYSTEM_LOGICAL_PROCESSOR_INFORMATION& one : found) {
    if (one.Relationship == RelationCache && one.Cache.Level == 2 && one.Cache.Size > 0)
      return one.Cache.Size;
  }
  return kLeastCacheBytes;
}

bool ask_for_tiles() noexcept { return false; }

}  // namespace flownpu
