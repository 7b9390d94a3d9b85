// SPDX-License-Identifier: Apache-2.0
// Memory that is requested from the system in pages.
#pragma once

#include <cstddef>
#include <memory>
#include <span>

namespace flownpu {

// Allocates at least `bytes`, page-aligned and not initialised, in large pages (2 MiB) where the
// system has them (Windows only gives them to users with the right to lock pages in memory),
// interleaved over all NUMA nodes (nodes.h). Throws std::bad_alloc.
std::shared_ptr<std::byte> allocate_large_pages(std::size_t bytes);

// Asks the system for large pages in memory that somebody else has allocated, before the first
// write to it. At the first touch the system takes some 2 us for a page of 4 KB, some 200 us for
// one of 2 MB. Does nothing for less than kNewEachTime bytes, because the C library reuses freed
// memory of that size, which has its pages already.
void ask_for_large_pages(std::span<const std::byte> memory);
// From 32 MiB on glibc always returns freed memory to the system (mallopt(3): M_MMAP_THRESHOLD
// grows no further).
inline constexpr std::size_t kNewEachTime = std::size_t{32} << 20;

// Zeroed memory, of which pages are only allocated when they are touched. An inaccessible page
// follows, so that writing past the end of the last page crashes instead of damaging other data.
class GuardedPages {
 public:
  // Throws std::bad_alloc.
  explicit GuardedPages(std::size_t bytes);
  ~GuardedPages();
  GuardedPages(const GuardedPages&) = delete;
  GuardedPages& operator=(const GuardedPages&) = delete;

  std::byte* data() const { return data_; }

 private:
  std::size_t mapped_ = 0;
  std::byte* data_ = nullptr;
};

}  // namespace flownpu
