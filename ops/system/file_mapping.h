// SPDX-License-Identifier: Apache-2.0
// Maps files into the process's memory for reading.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace flownpu {

// A file that is open for reading during the lifetime of this object; mappings outlive it.
class OpenFile {
 public:
  // Throws Error, with the path and the system's reason, if it cannot be opened.
  explicit OpenFile(const std::string& path);
  ~OpenFile();
  OpenFile(const OpenFile&) = delete;
  OpenFile& operator=(const OpenFile&) = delete;

  // The size of the file; 0 also if the system does not tell it.
  std::size_t bytes() const { return bytes_; }
  // Numbers that differ from those of other files, and of the same file after it was written to.
  using Identity = std::array<std::int64_t, 5>;
  const Identity& identity() const { return identity_; }

  // Maps the whole file; the caller releases the mapping with unmap(). Uses large pages where the
  // system has them for files, and interleaves the pages over all NUMA nodes (nodes.h). Throws
  // Error, with the path and the system's reason, if it fails.
  std::span<const std::byte> map() const;

 private:
  std::string path_;
  std::intptr_t handle_;  // the system's
  std::size_t bytes_ = 0;
  Identity identity_{};
};

void unmap(std::span<const std::byte> mapped);

}  // namespace flownpu
