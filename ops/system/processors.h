// SPDX-License-Identifier: Apache-2.0
// Processors as the system numbers them, and what it says of them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <thread>
#include <vector>

namespace flownpu {

// The processors that the process may run on; none if the system does not tell. On Windows those of
// the process's group: of a machine with more than 64, not all.
std::vector<int> allowed_processors();

// The processor that the calling thread runs on now; -1 if the system does not tell.
int current_processor();

// Lets a thread run on processors[first], [first + step], .. and nowhere else. The system may
// refuse (a processor was taken away): then it runs where it is put. Allocates nothing.
void keep_on(std::thread& thread, std::span<const int> processors, std::size_t first,
             std::size_t step);

// L2 of a core of this machine; 512 KB, the least of the processors in sight (Haswell and Skylake
// have 256 KB and 1 MB, Zen 512 KB and 1 MB), if the system does not tell.
std::int64_t second_level_cache_bytes();
inline constexpr std::int64_t kLeastCacheBytes = 512 * 1024;

// Asks for leave to use AMX's tiles. Linux (since 5.16) gives it unless a thread has an alternate
// signal stack too small for their state; on Windows the answer is no, for it was not tried there.
bool ask_for_tiles() noexcept;

}  // namespace flownpu
