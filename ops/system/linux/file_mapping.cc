// SPDX-License-Identifier: Apache-2.0
#include "ops/system/file_mapping.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "ops/error.h"
#include "ops/system/nodes.h"

namespace flownpu {

OpenFile::OpenFile(const std::string& path)
    : path_(path), handle_(::open(path.c_str(), O_RDONLY | O_CLOEXEC)) {
  if (handle_ < 0) fail("[FlowNPU] cannot open '", path, "': ", std::strerror(errno));
  struct stat status{};
  if (::fstat(static_cast<int>(handle_), &status) != 0 || status.st_size <= 0) return;
  bytes_ = static_cast<std::size_t>(status.st_size);
  identity_ = {static_cast<std::int64_t>(status.st_dev), static_cast<std::int64_t>(status.st_ino),
               status.st_size, status.st_mtim.tv_sec, status.st_mtim.tv_nsec};
}

OpenFile::~OpenFile() { ::close(static_cast<int>(handle_)); }

std::span<const std::byte> OpenFile::map() const {
  void* data = ::mmap(nullptr, bytes_, PROT_READ, MAP_PRIVATE, static_cast<int>(handle_), 0);
  if (data == MAP_FAILED)
    fail("[FlowNPU] cannot map the ", bytes_, " bytes of '", path_, "': ", std::strerror(errno));
  (void)::madvise(data, bytes_, MADV_HUGEPAGE);  // only advice: it may fail
  const std::span mapped(static_cast<const std::byte*>(data), bytes_);
  if (const std::vector<int> nodes = memory_nodes(); nodes.size() > 1)
    interleave_file(mapped, nodes);
  return mapped;
}

void unmap(std::span<const std::byte> mapped) {
  ::munmap(const_cast<std::byte*>(mapped.data()), mapped.size());
}

}  // namespace flownpu
