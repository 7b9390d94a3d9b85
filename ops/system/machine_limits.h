// SPDX-License-Identifier: Apache-2.0
// What of this machine the process may use: processors, by its affinity and by the CPU quota of its
// control groups, and memory, by their limit. The whole machine's, where Linux sets no limit. What
// Windows limits (job objects) is not read.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <vector>

#include "ops/system/processors.h"

namespace flownpu {

// A limit that a control group sets, and the file that says so.
template <typename Value>
struct GroupLimit {
  Value value{};
  std::filesystem::path file;
};

// How many processors' worth of time the process may use: 1.5 is 150 ms in 100 ms. The smallest
// quota of its group and those around it, of version 2 (cpu.max) or 1 (cpu.cfs_quota_us) of control
// groups, cgroups(7). `root` is where /proc and /sys are looked for.
std::optional<GroupLimit<double>> processor_quota(const std::filesystem::path& root = "/");

// Bytes of memory that the processes of the group may use together (memory.max,
// memory.limit_in_bytes), the smallest likewise.
std::optional<GroupLimit<std::int64_t>> memory_limit(const std::filesystem::path& root = "/");

// How many threads can compute at once: one for each core that computing_processors() leaves of the
// allowed processors, and no more than whole ones of the quota, at least 1. With one more than
// that, all would be stopped for the rest of each period (100 ms) when the quota is used up, and
// threads that share out a step wait for the slowest.
int usable_processors(const std::filesystem::path& root = "/",
                      const std::vector<int>& allowed = allowed_processors());

// Bytes of main memory that the machine has.
std::size_t machine_memory();

}  // namespace flownpu
