// SPDX-License-Identifier: Apache-2.0
// NUMA nodes: a machine with several sockets has memory at each of them, and a page is placed at
// the node of the thread that first touches it. Pages that all threads read are best interleaved
// over all nodes; otherwise one node serves all threads. On machines with one node, and on Windows,
// nothing is done.
#pragma once

#include <cstddef>
#include <filesystem>
#include <span>
#include <vector>

namespace flownpu {

// The nodes that have memory and processors; empty if the system does not tell. `root`: the folder
// that contains /sys.
std::vector<int> memory_nodes(const std::filesystem::path& root = "/");

// Interleaves pages over these nodes: those that are touched from now on, and those that exist
// already, unless another process has them mapped. interleave_file() is for mapped files: it reads
// missing pages, so that they are placed. Does nothing if a memory policy was chosen for the
// process (numactl). Failures, as under a container's filter of system calls, are ignored: memory
// is then only slower.
void interleave(std::span<const std::byte> pages, std::span<const int> nodes);
void interleave_file(std::span<const std::byte> pages, std::span<const int> nodes);

}  // namespace flownpu
