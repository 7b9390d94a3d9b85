// SPDX-License-Identifier: Apache-2.0
// The file of a compiled partition: the nodes that a device lowered it to, and their constants,
// which are used in place from a mapping of the file.
//
//   "FlowNPUC", u64 version, u64 bytes of the head, u64 identity, u64 sum, head, blobs
//
// Numbers are little-endian and have 64 bits; texts are UTF-8; a text or a list is its length
// followed by its items. The head consists of the text compatibility (Device::compatibility), the
// list of nodes, and the list of the blobs' sizes in bytes. The sum is the CRC-32 of the version,
// the head's size, the identity and the head. Each blob begins at the first multiple of 4096 bytes
// after the blob before it (the first one, after the head), as in the external data of ONNX files,
// and the file ends where the last blob does. Blobs have no checksums, since reading all weights to
// check them would take longer than loading them: a damaged blob yields wrong weights.
//
// The identity is a hash of the head and of all blobs, computed only while they are written. The
// model's EPContext node has it, too. A file of the same name may easily lie beside another model
// (copied alone, or found in another folder), and would mostly fit it.
//
// The sum only detects accidental damage. The contents are nevertheless checked as untrusted input,
// and nothing is prepared or run before the whole head has been checked.
#pragma once

#include <string>
#include <vector>

#include "ops/nodes/node.h"

namespace flownpu {

// Writes the file, and returns its identity: 16 hexadecimal digits. Throws Error if that fails, or
// if a text of the nodes is not UTF-8.
std::string write_context_file(const std::string& path, const std::string& compatibility,
                               const std::vector<Node>& nodes);

struct ContextFile {
  std::string compatibility;
  std::vector<Node> nodes;  // In topological order; their constants own the mapping.
};

// `context`: the EPContext node that stands for the partition; `identity`: of the partition that it
// stands for. Throws Error, which names the file, if the file is missing, damaged, of another
// version or another partition's, or if its nodes' inputs and outputs are not those of `context`.
ContextFile read_context_file(const std::string& path, const Node& context,
                              const std::string& identity);

}  // namespace flownpu
