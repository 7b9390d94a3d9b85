// SPDX-License-Identifier: Apache-2.0
// The machine's processors, by the system's numbers. A processor is a hardware thread: a core that
// runs two threads at once (SMT) is two processors.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <thread>
#include <vector>

namespace flownpu {

// The processors that the process may run on; empty if the system does not tell. On Windows only
// those of the process's processor group, which has at most 64.
std::vector<int> allowed_processors();

// The capacity (relative speed) of the fastest core.
inline constexpr int kFullCapacity = 1024;

struct Processor {
  // The system's number of the processor.
  int number = -1;
  // The smallest number among the processors that share its core.
  int core = -1;
  // The number of its NUMA node.
  int node = 0;
  // The speed of its core relative to the fastest of the described processors, which has
  // kFullCapacity.
  int capacity = kFullCapacity;
};

// Describes the processors with these numbers, in their order. What the system does not tell is
// assumed: each processor is a core of its own, at node 0, and all are equally fast. On Linux the
// description is read from /sys/devices/system below `root`; Windows tells no speeds.
std::vector<Processor> describe_processors(std::span<const int> numbers,
                                           const std::filesystem::path& root = "/");

// Selects the processors to run one thread each, the fastest first. Only the first of each core is
// used, because the dot products of one thread keep all of a core's multipliers busy. Cores less
// than half as fast as the fastest are not used: threads wait for the last task of a job (each
// thread has eight), and while such a core finishes one task, the others finish more than two.
std::vector<Processor> computing_processors(std::vector<Processor> processors);

// The number of the processor that the calling thread is running on; -1 if the system does not
// tell.
int current_processor();

// Restricts a thread to processors[first], processors[first + step], .. If the system refuses
// (because a processor was taken offline, for instance), the thread is not restricted. Allocates
// nothing.
void keep_on(std::thread& thread, std::span<const Processor> processors, std::size_t first,
             std::size_t step);

// The size in bytes of a core's L2 cache on this machine; 512 KB if the system does not tell
// (Haswell has 256 KB, Skylake 1 MB, Zen 512 KB or 1 MB).
std::int64_t second_level_cache_bytes();
inline constexpr std::int64_t kLeastCacheBytes = 512 * 1024;

// Requests permission to use AMX's tiles. Linux (since 5.16) grants it unless a thread has an
// alternate signal stack that is too small for their state. False on Windows, where it was not
// tested.
bool ask_for_tiles() noexcept;

}  // namespace flownpu
