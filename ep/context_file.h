// SPDX-License-Identifier: Apache-2.0
// The file of a compiled partition: the nodes that a device made of it, and their constants, which
// are used in place out of a mapping of the file.
//
//   "FlowNPUC", u64 version, u64 bytes of the head, head, blobs
//
// Numbers are little-endian and of 64 bits; a text or a list is its length and its items. The head:
// text compatibility (Device::compatibility), list of nodes, list of blobs {offset, bytes}. Blobs
// are 4096-byte aligned, as the external data of ONNX files is; sums of them are not kept, since
// reading all weights to check them would take longer than loading them.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "ops/node.h"

namespace flownpu {

// Written beside and renamed. Throws Error if it cannot be.
void write_context_file(const std::string& path, const std::string& compatibility,
                        const std::vector<Node>& nodes);

struct ContextFile {
  std::string compatibility;
  std::vector<Node> nodes;  // Their constants own the mapping.
};

// Throws Error if the file is missing, damaged, or of another version.
ContextFile read_context_file(const std::string& path);

}  // namespace flownpu
