// SPDX-License-Identifier: Apache-2.0
// Describes processors with GetLogicalProcessorInformation. Windows tells classes of faster and
// slower cores, but not their speeds, so all are assumed to be equally fast.
#include <windows.h>

#include <bit>
#include <cstdint>

#include "ops/system/processors.h"

namespace flownpu {

std::vector<Processor> describe_processors(std::span<const int> numbers,
                                           const std::filesystem::path& /*root*/) {
  std::vector<Processor> found;
  for (const int number : numbers) found.push_back({.number = number, .core = number});
  DWORD bytes = 0;
  GetLogicalProcessorInformation(nullptr, &bytes);
  std::vector<SYSTEM_LOGICAL_PROCESSOR_INFORMATION> all(
      bytes / sizeof(SYSTEM_LOGICAL_PROCESSOR_INFORMATION));
  if (GetLogicalProcessorInformation(all.data(), &bytes) == 0) return found;
  for (const SYSTEM_LOGICAL_PROCESSOR_INFORMATION& one : all) {
    for (Processor& processor : found) {
      if ((one.ProcessorMask >> processor.number & 1) == 0) continue;
      if (one.Relationship == RelationProcessorCore)
        processor.core = std::countr_zero(std::uint64_t{one.ProcessorMask});
      if (one.Relationship == RelationNumaNode)
        processor.node = static_cast<int>(one.NumaNode.NodeNumber);
    }
  }
  return found;
}

}  // namespace flownpu
