// SPDX-License-Identifier: Apache-2.0
// Memory that the system is asked for in pages.
#pragma once

#include <cstddef>
#include <memory>

namespace flownpu {

// At least `bytes` from the beginning of a page on, not initialised; in large pages (2 MiB) where
// the system has them, which Windows gives to users alone that have the right to lock pages in
// memory. Throws std::bad_alloc.
std::shared_ptr<std::byte> allocate_large_pages(std::size_t bytes);

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
