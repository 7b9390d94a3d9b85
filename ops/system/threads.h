// SPDX-License-Identifier: Apache-2.0
// Threads that sleep and wake one another, and their numbers.
#pragma once

#include <atomic>
#include <cstdint>

namespace flownpu {

// Sleeps until wake_all() was called for `word` and it holds another value than `value`; returns at
// once if it does. std::atomic's wait and notify_all, of which LLVM's C++ run time makes naps of up
// to 8 ms on Windows.
void wait_while(const std::atomic<std::uint32_t>& word, std::uint32_t value);
void wake_all(std::atomic<std::uint32_t>& word);

// The calling thread's number and its process's, as the system's tools show them.
std::int32_t thread_number();
std::int32_t process_number();

}  // namespace flownpu
