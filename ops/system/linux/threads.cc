// SPDX-License-Identifier: Apache-2.0
#include "ops/system/threads.h"

#include <sys/syscall.h>
#include <unistd.h>

namespace flownpu {

void wait_while(const std::atomic<std::uint32_t>& word, std::uint32_t value) {
  word.wait(value, std::memory_order_acquire);
}

void wake_all(std::atomic<std::uint32_t>& word) { word.notify_all(); }

std::int32_t thread_number() { return static_cast<std::int32_t>(::syscall(SYS_gettid)); }

std::int32_t process_number() { return ::getpid(); }

}  // namespace flownpu
