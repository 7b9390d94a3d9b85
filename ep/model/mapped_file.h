// SPDX-License-Identifier: Apache-2.0
// A file of weights, mapped for reading, and used where it is mapped.
//
// In large pages where the system has them for files (Linux has, on file systems whose page cache
// holds such: ext4 since 6.16, XFS and others before): a step of decoding reads every weight once,
// in order, and waits for as many translations as there are pages. Products of one row of
// activations took 3 to 4 % longer on pages of 4 KiB (two threads of a Zen 5 in a virtual machine,
// the same file mapped twice, in turn). For this a file is mapped whole: ONNX Runtime maps each
// tensor by itself, and only what fills a large page between its own ends can be one.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>

namespace flownpu {

class MappedFile {
 public:
  // One mapping for all who ask for the same file while one of them has it, so that sessions of a
  // process share its pages; of a file that was replaced or written since, a new one. Throws Error
  // if the file cannot be opened or mapped, or is empty.
  static std::shared_ptr<const MappedFile> shared(const std::string& path);

  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  std::span<const std::byte> bytes() const { return bytes_; }

 private:
  explicit MappedFile(std::span<const std::byte> bytes) : bytes_(bytes) {}

  std::span<const std::byte> bytes_;
};

}  // namespace flownpu
