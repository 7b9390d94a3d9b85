// SPDX-License-Identifier: Apache-2.0
// A file in the process's memory, for reading.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace flownpu {

// A file that is open for reading, at least until the end of a scope; what was mapped of it stays.
class OpenFile {
 public:
  // Throws Error, with the path and the system's reason, if it cannot be opened.
  explicit OpenFile(const std::string& path);
  ~OpenFile();
  OpenFile(const OpenFile&) = delete;
  OpenFile& operator=(const OpenFile&) = delete;

  // 0 also if the system does not tell.
  std::size_t bytes() const { return bytes_; }
  // What tells it from other files, and from itself after it was written to.
  using Identity = std::array<std::int64_t, 5>;
  const Identity& identity() const { return identity_; }

  // All of it, for unmap(); in large pages where the system has them for files, and on
  // all nodes in turn where memory has several (nodes.h). Throws Error.
  std::span<const std::byte> map() const;

 private:
  std::string path_;
  std::intptr_t handle_;  // the system's
  std::size_t bytes_ = 0;
  Identity identity_{};
};

void unmap(std::span<const std::byte> mapped);

}  // namespace flownpu
