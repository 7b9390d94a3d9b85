// SPDX-License-Identifier: Apache-2.0
#include "ops/system/threads.h"

#include <windows.h>

namespace flownpu {
namespace {

// WaitOnAddress compares the bytes of the atomic.
static_assert(sizeof(std::atomic<std::uint32_t>) == sizeof(std::uint32_t));

}  // namespace

void wait_while(const std::atomic<std::uint32_t>& word, std::uint32_t value) {
  auto* const address = const_cast<std::atomic<std::uint32_t>*>(&word);
  while (word.load(std::memory_order_acquire) == value)
    WaitOnAddress(address, &value, sizeof(value), INFINITE);
}

void wake_all(std::atomic<std::uint32_t>& word) { WakeByAddressAll(&word); }

std::int32_t thread_number() { return static_cast<std::int32_t>(GetCurrentThreadId()); }

std::int32_t process_number() { return static_cast<std::int32_t>(GetCurrentProcessId()); }

}  // namespace flownpu
