// SPDX-License-Identifier: Apache-2.0
#include "ops/system/forks.h"

#include <pthread.h>

#include <atomic>

namespace flownpu {
namespace {

std::atomic<std::uint32_t> forks_so_far{0};

// While the library is loaded, so that its handler comes before all others of this library.
[[maybe_unused]] const int counted = pthread_atfork(nullptr, nullptr, [] { ++forks_so_far; });

}  // namespace

std::uint32_t forks() { return forks_so_far.load(std::memory_order_relaxed); }

void in_forked_children(void (*act)()) { pthread_atfork(nullptr, nullptr, act); }

}  // namespace flownpu
