// SPDX-License-Identifier: Apache-2.0
// Processors as the system numbers them, and what it says of them. A processor is a hardware
// thread: a core that computes two threads at once (SMT) is two of them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <thread>
#include <vector>

namespace flownpu {

// The processors that the process may run on; none if the system does not tell. On Windows those of
// the process's group: of a machine with more than 64, not all.
std::vector<int> allowed_processors();

// The work that the fastest core of a machine does in a time: a unit of what others do in it.
inline constexpr int kFullCapacity = 1024;

struct Processor {
  // The system's.
  int number = -1;
  // The least number of those that share its core with it.
  int core = -1;
  // The node of memory near it (NUMA).
  int node = 0;
  // How fast its core is beside the fastest of `processors`, of kFullCapacity.
  int capacity = kFullCapacity;
};

// What the system says of these processors, in their order. Where it does not say it, a processor
// is a core of its own, near node 0, and as fast as all others. Linux says it below
// /sys/devices/system of `root`; Windows tells no speeds.
std::vector<Processor> describe_processors(std::span<const int> numbers,
                                           const std::filesystem::path& root = "/");

// Those that a thread each is put on, the fastest first: of each core the first one, for a
// product's dots take all of a core's multipliers, and two threads on it take them from each other;
// and no core that does less than half of the fastest one's work in a time. Threads wait for the
// last task of a job, of which each has eight: in the time in which such a core ends one, the
// others end more than two.
std::vector<Processor> computing_processors(std::vector<Processor> processors);

// The processor that the calling thread runs on now; -1 if the system does not tell.
int current_processor();

// Lets a thread run on processors[first], [first + step], .. and nowhere else. The system may
// refuse (a processor was taken away): then it runs where it is put. Allocates nothing.
void keep_on(std::thread& thread, std::span<const Processor> processors, std::size_t first,
             std::size_t step);

// L2 of a core of this machine; 512 KB, the least of the processors in sight (Haswell and Skylake
// have 256 KB and 1 MB, Zen 512 KB and 1 MB), if the system does not tell.
std::int64_t second_level_cache_bytes();
inline constexpr std::int64_t kLeastCacheBytes = 512 * 1024;

// Asks for leave to use AMX's tiles. Linux (since 5.16) gives it unless a thread has an alternate
// signal stack too small for their state; on Windows the answer is no, for it was not tried there.
bool ask_for_tiles() noexcept;

}  // namespace flownpu
