// SPDX-License-Identifier: Apache-2.0
// Compiled models: ONNX Runtime writes a model in which an EPContext node replaces each partition.
// The node names the file that stores the partition (file.h).
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
  // The path to which the compiled model is written or, without `enable`, from which it was read;
  // empty: ORT's default.
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

// The text that a compiled model stores in its metadata; `device`: Device::compatibility(). The
// second function is the reverse: empty for a text of a compiled model that this build does not
// read.
std::string context_compatibility(const std::string& device);
std::string_view device_of_context(std::string_view compatibility);

}  // namespace flownpu
