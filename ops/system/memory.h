// SPDX-License-Identifier: Apache-2.0
// Memory that the system is asked for in pages.
#pragma once

#include <cstddef>
#include <memory>
#include <span>

namespace flownpu {

// At least `bytes` from the beginning of a page on, not initialised; in large pages (2 MiB) where
// the system has them, which Windows gives to users alone that have the right to lock pages in
// memory; on all nodes in turn where memory has several (nodes.h). Throws std::bad_alloc.
std::shared_ptr<std::byte> allocate_large_pages(std::size_t bytes);

// Has memory that others have allocated, and that is written to for the first time, come in large
// pages as far as it fills such, where the system has them: a page of 4 KB takes the system some 2
// us at first touch, one of 2 MB some 200. Of less than kNewEachTime nothing is asked: the C
// library keeps what is freed of it, so that it has its pages already.
void ask_for_large_pages(std::span<const std::byte> memory);
// Memory from 32 MiB on glibc gives back to the system, and asks for anew (mallopt(3): the most
// that M_MMAP_THRESHOLD grows to).
inline constexpr std::size_t kNewEachTime = std::size_t{32} << 20;

// Zeros, which take memory once they are touched. A page that nobody may touch follows, so that who
// writes past the end of the last page is stopped there.
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
