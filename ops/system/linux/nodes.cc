// SPDX-License-Identifier: Apache-2.0
// Uses the system calls mbind(2) and set_mempolicy(2) directly, because the C library has no
// functions for them.
#include "ops/system/nodes.h"

#include <linux/mempolicy.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <fstream>
#include <limits>

namespace flownpu {
namespace {

// A bit mask of nodes, as the system calls take it. Nodes from number 64 on are left out.
struct NodeMask {
  explicit NodeMask(std::span<const int> nodes) {
    for (const int node : nodes) {
      if (node < kBits) bits |= std::uint64_t{1} << node;
    }
  }

  static constexpr int kBits = std::numeric_limits<std::uint64_t>::digits;
  // The system calls ignore the last bit of the given length, so the length is one more.
  static constexpr std::size_t kLength = kBits + 1;
  std::uint64_t bits = 0;
};

bool policy_is_chosen() {
  int policy = MPOL_DEFAULT;
  return ::syscall(SYS_get_mempolicy, &policy, nullptr, 0, nullptr, 0) == 0 &&
         policy != MPOL_DEFAULT;
}

std::byte* address(std::span<const std::byte> pages) {
  return const_cast<std::byte*>(pages.data());
}

// The numbers of a list in a file, such as "0-1,4".
std::vector<int> numbers_in(const std::filesystem::path& path) {
  std::vector<int> numbers;
  std::ifstream file(path);
  for (int first = 0; file >> first; file.ignore()) {
    int last = first;
    if (file.peek() == '-') file.ignore() >> last;
    for (int number = first; number <= last; ++number) numbers.push_back(number);
  }
  return numbers;
}

void bind_pages(std::span<const std::byte> pages, const NodeMask& mask) {
  (void)::syscall(SYS_mbind, address(pages), pages.size(), MPOL_INTERLEAVE, &mask.bits,
                  NodeMask::kLength, MPOL_MF_MOVE);
}

}  // namespace

// Leaves out nodes without processors: their memory is slower, or a graphics card's.
std::vector<int> memory_nodes(const std::filesystem::path& root) {
  const std::filesystem::path nodes = root / "sys/devices/system/node";
  std::vector<int> found = numbers_in(nodes / "has_memory");
  const std::vector<int> with_processors = numbers_in(nodes / "has_cpu");
  std::erase_if(found, [&](int node) {
    return std::ranges::find(with_processors, node) == with_processors.end();
  });
  return found;
}

void interleave(std::span<const std::byte> pages, std::span<const int> nodes) {
  if (!policy_is_chosen()) bind_pages(pages, NodeMask(nodes));
}

// The policy of the reading thread, not of the mapping, chooses the node of a file's page. Pages
// already in memory are moved afterwards.
void interleave_file(std::span<const std::byte> pages, std::span<const int> nodes) {
  if (policy_is_chosen()) return;
  const NodeMask mask(nodes);
  (void)::syscall(SYS_set_mempolicy, MPOL_INTERLEAVE, &mask.bits, NodeMask::kLength);
#if defined(MADV_POPULATE_READ)
  (void)::madvise(address(pages), pages.size(), MADV_POPULATE_READ);
#endif
  (void)::syscall(SYS_set_mempolicy, MPOL_DEFAULT, nullptr, 0);
  bind_pages(pages, mask);
}

}  // namespace flownpu
