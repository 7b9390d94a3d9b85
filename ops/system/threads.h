// SPDX-License-Identifier: Apache-2.0
// Lets threads sleep until another thread wakes them, and tells their numbers.
#pragma once

#include <atomic>
#include <cstdint>

namespace flownpu {

// Sleeps until wake_all() is called for `word` and the word differs from `value`; returns at once
// if it already differs. Unlike std::atomic's wait, it sleeps at once: GNU's C++ runtime first
// gives up the rest of the thread's turn on its core, and LLVM's on Windows sleeps for up to 8 ms
// at a time. wake_all() always calls the system.
void wait_while(const std::atomic<std::uint32_t>& word, std::uint32_t value);
void wake_all(std::atomic<std::uint32_t>& word);

// The ids of the calling thread and of its process, as the system's tools show them.
std::int32_t thread_number();
std::int32_t process_number();

}  // namespace flownpu
