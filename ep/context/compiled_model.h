// SPDX-License-Identifier: Apache-2.0
// Compiled models: ONNX Runtime writes a model in which an EPContext node stands for each
// partition, and the node names the file in which the partition is kept (file.h).
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "ep/api.h"
#include "ops/device.h"
#include "ops/nodes/node.h"

namespace flownpu {

// What a session asks for with ORT's entries `ep.context_enable`, `ep.context_file_path` and
// `ep.context_embed_mode`.
struct ContextRequest {
  bool enable = false;
  std::string model_path;  // of the model to be written; empty: ORT's default
};

// Throws Error if the compiled partitions are to be embedded in the model: their weights are mapped
// out of a file.
ContextRequest read_context_request(const Api& api, const OrtSessionOptions* options);

// Whether the node stands for a partition that this provider compiled.
bool is_context(const Node& node);

// The files of those among the nodes, as messages name them; empty if there are none.
std::string context_files(const std::vector<Node>& nodes);

// The nodes with each of those replaced by what it stands for. Throws Error if the partition cannot
// be read, or was made for something else than `device` is.
std::vector<Node> expand_contexts(std::vector<Node> nodes, const Lowering& lowering,
                                  const Device& device);

// Writes the partition's file beside the model that ORT will write, and returns the node that names
// it, which ORT then owns. `partition`: its number; `fused`: the node that ORT made of it.
OrtNode* write_context(const Api& api, const ContextRequest& request, const std::string& model_path,
                       std::size_t partition, const OrtNode* fused,
                       const std::string& compatibility, const std::vector<Node>& nodes);

// What a compiled model says of itself in its metadata, for a device's Device::compatibility(); and
// whether this build reads such.
std::string context_compatibility(const std::string& device);
bool reads_context(std::string_view compatibility);

}  // namespace flownpu
