// SPDX-License-Identifier: Apache-2.0
#include "ep/model/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <map>
#include <mutex>
#include <tuple>

#include "ops/error.h"

namespace flownpu {
namespace {

// Closed at the end of a scope; a mapping stays.
class OpenFile {
 public:
  explicit OpenFile(const std::string& path)
      : descriptor_(::open(path.c_str(), O_RDONLY | O_CLOEXEC)) {
    if (descriptor_ < 0) fail("[FlowNPU] cannot open '", path, "': ", std::strerror(errno));
  }
  ~OpenFile() { ::close(descriptor_); }
  OpenFile(const OpenFile&) = delete;
  OpenFile& operator=(const OpenFile&) = delete;

  int descriptor() const { return descriptor_; }

 private:
  int descriptor_;
};

// What tells a file from others, and from itself after it was written to.
using Identity = std::tuple<dev_t, ino_t, off_t, std::int64_t, std::int64_t>;

Identity identity(const struct stat& status) {
  return {status.st_dev, status.st_ino, status.st_size, status.st_mtim.tv_sec,
          status.st_mtim.tv_nsec};
}

}  // namespace

std::shared_ptr<const MappedFile> MappedFile::shared(const std::string& path) {
  static std::mutex mutex;
  static std::map<Identity, std::weak_ptr<const MappedFile>> files;

  const OpenFile file(path);
  struct stat status{};
  if (::fstat(file.descriptor(), &status) != 0 || status.st_size <= 0)
    fail("[FlowNPU] cannot read '", path, "': expected a file that is not empty");
  const std::scoped_lock lock(mutex);
  std::erase_if(files, [](const auto& entry) { return entry.second.expired(); });
  std::weak_ptr<const MappedFile>& known = files[identity(status)];
  if (std::shared_ptr<const MappedFile> mapped = known.lock()) return mapped;

  const auto bytes = static_cast<std::size_t>(status.st_size);
  void* data = ::mmap(nullptr, bytes, PROT_READ, MAP_PRIVATE, file.descriptor(), 0);
  if (data == MAP_FAILED)
    fail("[FlowNPU] cannot map the ", bytes, " bytes of '", path, "': ", std::strerror(errno));
  std::shared_ptr<const MappedFile> mapped(new MappedFile(data, bytes));
  (void)::madvise(data, bytes, MADV_HUGEPAGE);  // advice: without it the same, but slower
  known = mapped;
  return mapped;
}

MappedFile::~MappedFile() { ::munmap(data_, bytes_); }

}  // namespace flownpu
