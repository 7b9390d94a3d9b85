// SPDX-License-Identifier: Apache-2.0
#include "ops/system/threads.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <limits>

namespace flownpu {
namespace {

// The system compares the bytes of the atomic.
static_assert(sizeof(std::atomic<std::uint32_t>) == sizeof(std::uint32_t));

}  // namespace

void wait_while(const std::atomic<std::uint32_t>& word, std::uint32_t value) {
  while (word.load(std::memory_order_acquire) == value)
    ::syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
}

void wake_all(std::atomic<std::uint32_t>& word) {
  ::syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, std::numeric_limits<int>::max(), nullptr, nullptr,
            0);
}

std::int32_t thread_number() { return static_cast<std::int32_t>(::syscall(SYS_gettid)); }

std::int32_t process_number() { return ::getpid(); }

}  // namespace flownpu
