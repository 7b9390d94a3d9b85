// SPDX-License-Identifier: Apache-2.0
// A file of weights that is mapped for reading and used in place.
//
// Large pages are used where the system has them for files (Linux has them on file systems with
// large folios: ext4 since 6.16, XFS and others before). A decode step reads every weight once, in
// order, and waits for an address translation for each page: products of one row of activations
// took 3 to 4 % longer on pages of 4 KiB (two threads of a Zen 5 in a virtual machine, the same
// file mapped twice, in turn). The file is mapped as a whole, unlike in ONNX Runtime, which maps
// each tensor by itself, so that pages at a tensor's ends cannot be large ones.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>

namespace flownpu {

class MappedFile {
 public:
  // Returns the file's existing mapping while somebody holds it, so that sessions of a process
  // share its pages. Returns a new one if there is none, or if the file was replaced or written to
  // since. Throws Error if the file cannot be opened or mapped, or is empty.
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
