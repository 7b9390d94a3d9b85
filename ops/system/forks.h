// SPDX-License-Identifier: Apache-2.0
// fork(2): a child has the memory of its parent, but only the thread that called fork(). Locks and
// counts of other threads stay as they were, and drivers wait for threads that the child lacks.
// Windows has no such thing.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace flownpu {

// The number of forks between the first process with this library and this one. An object with
// another count was made by an ancestor.
std::uint32_t forks();

// Calls `act` in each child, before fork() returns there and after forks() has counted. It must not
// allocate or lock anything.
void in_forked_children(void (*act)());

// The error for a device that an ancestor of this process has opened, so that this process cannot
// use it.
std::string forked_text(std::string_view device);

}  // namespace flownpu
