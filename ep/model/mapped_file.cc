// SPDX-License-Identifier: Apache-2.0
#include "ep/model/mapped_file.h"

#include <map>
#include <mutex>

#include "ops/error.h"
#include "ops/system/file_mapping.h"

namespace flownpu {

std::shared_ptr<const MappedFile> MappedFile::shared(const std::string& path) {
  static std::mutex mutex;
  static std::map<OpenFile::Identity, std::weak_ptr<const MappedFile>> files;

  const OpenFile file(path);
  if (file.bytes() == 0)
    fail("[FlowNPU] cannot read '", path, "': expected a file that is not empty");
  const std::scoped_lock lock(mutex);
  std::erase_if(files, [](const auto& entry) { return entry.second.expired(); });
  std::weak_ptr<const MappedFile>& known = files[file.identity()];
  if (std::shared_ptr<const MappedFile> mapped = known.lock()) return mapped;
  std::shared_ptr<const MappedFile> mapped(new MappedFile(file.map()));
  known = mapped;
  return mapped;
}

MappedFile::~MappedFile() { unmap(bytes_); }

}  // namespace flownpu
