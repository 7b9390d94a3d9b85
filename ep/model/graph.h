// SPDX-License-Identifier: Apache-2.0
// Reads ONNX Runtime's graph as nodes of ops/nodes/node.h.
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
  // A node without a name in the model gets the name of its first output.
  Node node;
  // Whether the node has subgraphs, and the values of this graph that they read.
  bool has_subgraphs = false;
  std::vector<std::string> implicit_inputs;
  // Those of the implicit inputs that are constants.
  std::vector<std::string> implicit_constants;
  // Whether it runs its subgraphs, its bodies, and computes nothing else: If, Loop or Scan.
  // `bodies`: those that have nodes. ONNX Runtime asks for each of them what is taken, before it
  // asks for this graph, and in the order of the owners' numbers.
  bool is_control_flow = false;
  std::size_t bodies = 0;
  std::size_t number = 0;
  // Whether a provider that the user listed before this one has taken the node.
  bool is_elsewhere = false;
  // The reason why no device can take the node: a subgraph, or a type or attribute that `Node`
  // cannot represent and that `node` then lacks. Empty if `node` is complete.
  std::string unsupported;
};

// Converts ORT's element type; nullopt if no DataType corresponds to it.
std::optional<DataType> data_type_of(ort::ONNXTensorElementDataType type);
// Converts to ORT's element type, whose values are also ONNX's.
ort::ONNXTensorElementDataType element_of(DataType type);

bool is_control_flow(const Api& api, const OrtNode* node);

// The nodes of the graph, in topological order, with constants as initializers.h reads them.
std::vector<GraphNode> read_graph(const Api& api, const OrtGraph* graph);

// The domains that the graph's model imports, with their versions.
OperatorSets operator_sets(const Api& api, const OrtGraph* graph);

// The path of the model's file; empty if the model was not read from a file.
std::string model_path(const Api& api, const OrtGraph* graph);

// Names of the graph's outputs.
std::vector<std::string> output_names(const Api& api, const OrtGraph* graph);

// Names of a node's inputs and outputs; empty for an absent one.
std::vector<std::string> input_names(const Api& api, const OrtNode* node);
std::vector<std::string> output_names(const Api& api, const OrtNode* node);

}  // namespace flownpu
