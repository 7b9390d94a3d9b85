// SPDX-License-Identifier: Apache-2.0
// Describes processors by Linux's files in /sys/devices/system/cpu
// (Documentation/ABI/stable/sysfs-devices-system-cpu).
#include <algorithm>
#include <charconv>
#include <cstdint>
#include <fstream>
#include <string>
#include <string_view>
#include <system_error>

#include "ops/system/processors.h"

namespace flownpu {
namespace {

namespace fs = std::filesystem;

// The first number in a file, which is the smallest in a list such as "2-3,6"; `otherwise` if there
// is none.
int number_in(const fs::path& file, int otherwise) {
  int number = otherwise;
  std::ifstream(file) >> number;
  return number;
}

// The NUMA node of a processor, whose folder has a link such as "node1"; 0 if there is none.
int node_of(const fs::path& folder) {
  constexpr std::string_view kNode = "node";
  std::error_code error;
  for (const fs::directory_entry& entry : fs::directory_iterator(folder, error)) {
    const std::string name = entry.path().filename().string();
    if (!name.starts_with(kNode)) continue;
    int node = 0;
    const char* end = name.data() + name.size();
    const auto [stop, code] = std::from_chars(name.data() + kNode.size(), end, node);
    if (code == std::errc() && stop == end) return node;
  }
  return 0;
}

// If the slowest core has at least this part of the fastest one's speed, all count as equally fast.
// Maximum clocks differ by a few percent within a kind of cores, and by a fifth or more between
// kinds.
constexpr double kSameKind = 0.9;

// The relative speeds of the processors' cores, in arbitrary units: cpu_capacity if it differs
// between cores (Arm, Intel's hybrid processors), else the maximum clock; all 1 if neither differs.
std::vector<double> speeds(std::span<const int> numbers, const fs::path& cpus) {
  for (const char* const file : {"cpu_capacity", "cpufreq/cpuinfo_max_freq"}) {
    std::vector<double> found;
    for (const int number : numbers)
      found.push_back(number_in(cpus / ("cpu" + std::to_string(number)) / file, 0));
    if (found.empty()) break;
    const auto [least, most] = std::ranges::minmax(found);
    if (least > 0 && least < kSameKind * most) return found;
  }
  return std::vector<double>(numbers.size(), 1);
}

}  // namespace

std::vector<Processor> describe_processors(std::span<const int> numbers, const fs::path& root) {
  const fs::path cpus = root / "sys/devices/system/cpu";
  const std::vector<double> work = speeds(numbers, cpus);
  const double most = work.empty() ? 1 : std::ranges::max(work);
  std::vector<Processor> found;
  for (std::size_t i = 0; i < numbers.size(); ++i) {
    const fs::path folder = cpus / ("cpu" + std::to_string(numbers[i]));
    found.push_back({numbers[i], number_in(folder / "topology/thread_siblings_list", numbers[i]),
                     node_of(folder), static_cast<int>(work[i] / most * kFullCapacity)});
  }
  return found;
}

}  // namespace flownpu
