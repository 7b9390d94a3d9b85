// SPDX-License-Identifier: Apache-2.0
#include "ops/system/new_file.h"

#include <cerrno>
#include <random>
#include <system_error>

namespace flownpu {
namespace {

// Not the process's number, which may be equal in two containers that share a folder.
std::filesystem::path unfinished_name(std::filesystem::path path) {
  path += ".";
  path += std::to_string(std::random_device()());
  path += ".unfinished";
  return path;
}

}  // namespace

NewFile::NewFile(const std::filesystem::path& path)
    : path_(path),
      unfinished_(unfinished_name(path)),
      content_(unfinished_, std::ios::binary | std::ios::trunc) {
  if (!content_) problem_ = std::generic_category().message(errno);
}

NewFile::~NewFile() {
  if (unfinished_.empty()) return;
  content_.close();
  std::error_code ignored;
  std::filesystem::remove(unfinished_, ignored);
}

std::string NewFile::finish() {
  if (!problem_.empty()) return problem_;
  content_.close();
  if (!content_) return "not all of it could be written; is the disk full?";
  std::error_code error;
  std::filesystem::rename(unfinished_, path_, error);
  if (error) return error.message();
  unfinished_.clear();
  return "";
}

}  // namespace flownpu
