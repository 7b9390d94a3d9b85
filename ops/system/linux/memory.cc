// SPDX-License-Identifier: Apache-2.0
#include "ops/system/memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <new>
#include <vector>

#include "ops/system/nodes.h"

namespace flownpu {
namespace {

// The size of large pages on x86-64.
constexpr std::size_t kLargePage = std::size_t{2} << 20;

}  // namespace

std::shared_ptr<std::byte> allocate_large_pages(std::size_t bytes) {
  const std::size_t size = (bytes + kLargePage - 1) / kLargePage * kLargePage;
  void* memory = std::aligned_alloc(kLargePage, size);
  if (memory == nullptr) throw std::bad_alloc();
  (void)::madvise(memory, size, MADV_HUGEPAGE);  // only advice: it may fail
  if (const std::vector<int> nodes = memory_nodes(); nodes.size() > 1)
    interleave({static_cast<std::byte*>(memory), size}, nodes);
  return {static_cast<std::byte*>(memory), std::free};
}

void ask_for_large_pages(std::span<const std::byte> memory) {
  if (memory.size() < kNewEachTime) return;
  void* first = const_cast<std::byte*>(memory.data());
  std::size_t left = memory.size();
  if (std::align(kLargePage, kLargePage, first, left) == nullptr) return;
  (void)::madvise(first, left / kLargePage * kLargePage, MADV_HUGEPAGE);  // advice
}

GuardedPages::GuardedPages(std::size_t bytes) {
  if (bytes > SIZE_MAX / 2) throw std::bad_alloc();
  const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));  // up to 64 KB on Arm
  mapped_ = (bytes + page - 1) / page * page + page;
  void* memory =
      ::mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  data_ = static_cast<std::byte*>(memory);
  ::mprotect(data_ + mapped_ - page, page, PROT_NONE);
}

GuardedPages::~GuardedPages() { ::munmap(data_, mapped_); }

}  // namespace flownpu
