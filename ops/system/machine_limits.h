// SPDX-License-Identifier: Apache-2.0
// The part of this machine that the process may use. Its affinity and the CPU quota of its control
// groups (cgroups) limit processors; its control groups limit memory. Windows' limits (job objects)
// are not read.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <vector>

#include "ops/system/processors.h"

namespace flownpu {

// A limit that a control group sets, and the file that contains it.
template <typename Value>
struct GroupLimit {
  Value value{};
  std::filesystem::path file;
};

// How much CPU time the process may use, in processors: 1.5 is 150 ms in every 100 ms. The smallest
// quota of its control group and the group's parents, of version 2 (cpu.max) or 1
// (cpu.cfs_quota_us), see cgroups(7); nullopt if there is none. `root`: the folder that contains
// /proc and /sys.
std::optional<GroupLimit<double>> processor_quota(const std::filesystem::path& root = "/");

// The bytes of memory that the processes of the group may use together (memory.max,
// memory.limit_in_bytes): likewise the smallest limit, or nullopt.
std::optional<GroupLimit<std::int64_t>> memory_limit(const std::filesystem::path& root = "/");

// How many threads can compute at once: one for each core that computing_processors() selects from
// the allowed processors, but at most the quota, rounded down, and at least 1. With more threads
// the quota would end before each period (100 ms) does, and all threads would stop for the rest of
// it.
int usable_processors(const std::filesystem::path& root = "/",
                      const std::vector<int>& allowed = allowed_processors());

// The size of the machine's main memory in bytes.
std::size_t machine_memory();

}  // namespace flownpu
