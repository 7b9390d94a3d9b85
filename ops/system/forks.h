// SPDX-License-Identifier: Apache-2.0
// fork(2): a child begins with the memory of its parent, but with one thread, the one that called
// fork(). Locks that other threads held stay locked, what they counted stays counted, and drivers
// wait for threads of theirs that the child lacks. Windows has no such thing.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace flownpu {

// How often this process was forked from one that had this library: what was made at another count
// was made by a process that this one descends from.
std::uint32_t forks();

// Calls `act` in each child, before fork() returns there and after forks() has counted. It must not
// allocate or lock anything.
void in_forked_children(void (*act)());

// The error of a device that this process cannot use, because an ancestor of it has opened it.
std::string forked_text(std::string_view device);

}  // namespace flownpu
