// SPDX-License-Identifier: Apache-2.0
// Compiled models: ONNX Runtime writes a model in which each partition is replaced by an EPContext
// node, which names the file in which the partition is stored (file.h).
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "ep/api.h"
#include "ops/device.h"
#include "ops/nodes/node.h"

namespace flownpu {

// A session's settings of compiled models: ORT's entries `ep.context_enable`,
// `ep.context_file_path` and `ep.context_embed_mode`.
struct ContextRequest {
  bool enable = false;
  // Where the compiled model is written, or, without `enable`, was read; empty: where ORT's default
  // is, or ORT has read it.
  std::string model_path;
};

// Throws Error if the compiled partitions are to be embedded in the model, which is not supported.
ContextRequest read_context_request(const Api& api, const OrtSessionOptions* options);

// Whether the node stands for a partition that this provider compiled.
bool is_context(const Node& node);

// The files that such nodes name, quoted and separated by commas, for messages; empty if there are
// none.
std::string context_files(const std::vector<Node>& nodes);

// Replaces each such node by the nodes in its file, which is in the folder of request.model_path
// or, if it is not there, in the model's. Throws Error if the file cannot be read, is another
// model's, or was made for another device than `device`.
std::vector<Node> expand_contexts(std::vector<Node> nodes, const ContextRequest& request,
                                  const Lowering& lowering, const Device& device);

// Writes the partition's file beside the model that ORT will write, and returns a new EPContext
// node that names the file, which ORT then owns. `partition`: its number; `fused`: the node that
// ORT has made of the partition.
OrtNode* write_context(const Api& api, const ContextRequest& request, const std::string& model_path,
                       std::size_t partition, const OrtNode* fused,
                       const std::string& compatibility, const std::vector<Node>& nodes);

// The text that a compiled model stores in its metadata; `device`: Device::compatibility(). And the
// reverse: empty for a text of a compiled model that this build does not read.
std::string context_compatibility(const std::string& device);
std::string_view device_of_context(std::string_view compatibility);

}  // namespace flownpu
