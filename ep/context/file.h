// SPDX-License-Identifier: Apache-2.0
// The file of a compiled partition: the nodes that a device made of it, and their constants, which
// are used in place out of a mapping of the file.
//
//   "FlowNPUC", u64 version, u64 bytes of the head, u64 sum, head, blobs
//
// Numbers are little-endian and of 64 bits; a text is UTF-8; a text or a list is its length and its
// items. The head: text compatibility (Device::compatibility), list of nodes, list of the blobs'
// bytes. The sum is the CRC-32 of the version, the head's bytes and the head. Each blob begins at
// the first multiple of 4096 bytes after the blob before it (the first, after the head), as the
// external data of ONNX files do, and the file ends where the last one does. Blobs have no sums,
// since reading all weights to check them would take longer than loading them: a blob that is
// damaged gives other numbers.
//
// The sum tells what was damaged by accident. What is read is checked as if anybody had written it
// even so, and nothing is prepared or run before all of it has been.
#pragma once

#include <string>
#include <vector>

#include "ops/nodes/node.h"

namespace flownpu {

// Written beside and renamed. Throws Error if it cannot be, or if a text of the nodes is not UTF-8.
void write_context_file(const std::string& path, const std::string& compatibility,
                        const std::vector<Node>& nodes);

struct ContextFile {
  std::string compatibility;
  std::vector<Node> nodes;  // In topological order; their constants own the mapping.
};

// `context`: the node of the model that stands for the partition. Throws Error, which names the
// file, if it is missing, damaged, of another version, or reads and makes other values than the
// node has.
ContextFile read_context_file(const std::string& path, const Node& context);

}  // namespace flownpu
