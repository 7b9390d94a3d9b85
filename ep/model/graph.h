// SPDX-License-Identifier: Apache-2.0
// ONNX Runtime's graph in the words of ops/nodes/node.h.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "ep/api.h"
#include "ep/model/onnx_model.h"
#include "ops/nodes/node.h"

namespace flownpu {

struct GraphNode {
  const OrtNode* handle = nullptr;
  // A node that the model gives no name has the name of its first output.
  Node node;
  // If, Loop and Scan have subgraphs, which read these values from the graph the node is in.
  bool has_subgraphs = false;
  std::vector<std::string> implicit_inputs;
  // The node is with a provider that the user listed before ours.
  bool is_elsewhere = false;
  // Why no device can take the node, whatever its operator: a subgraph, or a type or attribute that
  // ops/ has no word for. `node` then lacks these. Empty if it is complete.
  std::string unsupported;
};

// ORT's element type as ours, if there is one.
std::optional<DataType> data_type_of(ort::ONNXTensorElementDataType type);
// And ours as ORT's, which are ONNX's own numbers.
ort::ONNXTensorElementDataType element_of(DataType type);

// The nodes of the graph, in topological order. Their constants are where initializers.h says.
std::vector<GraphNode> read_graph(const Api& api, const OrtGraph* graph);

// The versions of the domains that the graph's model imports.
OperatorSets operator_sets(const Api& api, const OrtGraph* graph);

// The model's file; empty if it was not read from one.
std::string model_path(const Api& api, const OrtGraph* graph);

// Names of the graph's outputs.
std::vector<std::string> output_names(const Api& api, const OrtGraph* graph);

// Names of a node's inputs and outputs; empty for an absent one.
std::vector<std::string> input_names(const Api& api, const OrtNode* node);
std::vector<std::string> output_names(const Api& api, const OrtNode* node);

}  // namespace flownpu
