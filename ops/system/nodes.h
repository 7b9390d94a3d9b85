// SPDX-License-Identifier: Apache-2.0
// Nodes of memory (NUMA): a machine of several sockets has memory at each, and a page lies where
// the thread ran that first touched it. What all threads read is best on all nodes in turn, or one
// node has to answer everybody. On a machine of one node, and on Windows, nothing is done.
#pragma once

#include <cstddef>
#include <filesystem>
#include <span>
#include <vector>

namespace flownpu {

// The nodes that have memory and processors; none if the system does not tell. `root` is where /sys
// is looked for.
std::vector<int> memory_nodes(const std::filesystem::path& root = "/");

// Has the pages of [pages, end) lie on these nodes in turn: those that are touched from now on,
// and, as far as no other process has them mapped, those that are there. Pages of a file that are
// not in memory are read, so that they come to lie there. Who has chosen a policy for the process
// (numactl) has it kept. Advice: without it, or where a container's filter of system calls refuses,
// the same, but slower.
void interleave(std::span<const std::byte> pages, std::span<const int> nodes);
void interleave_file(std::span<const std::byte> pages, std::span<const int> nodes);

}  // namespace flownpu
