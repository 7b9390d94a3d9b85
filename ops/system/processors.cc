// SPDX-License-Identifier: Apache-2.0
#include "ops/system/processors.h"

#include <algorithm>
#include <functional>
#include <set>

namespace flownpu {

std::vector<Processor> computing_processors(std::vector<Processor> processors) {
  std::set<int> cores;
  std::erase_if(processors, [&](const Processor& one) { return !cores.insert(one.core).second; });
  std::ranges::stable_sort(processors, std::greater(), &Processor::capacity);
  std::erase_if(processors, [&](const Processor& one) {
    return 2 * one.capacity < processors.front().capacity;
  });
  return processors;
}

}  // namespace flownpu
