// SPDX-License-Identifier: Apache-2.0
#include "ep/model/graph.h"

#include <algorithm>
#include <array>
#include <memory>
#include <utility>

#include "ep/model/initializers.h"
#include "ops/system/paths.h"

namespace flownpu {
namespace {

// ORT's API returns a list through one function for the count and one that fills an array.
template <typename Item, typename Owner, typename Count, typename Get>
std::vector<const Item*> list(const Api& api, const Owner* owner, const Count& count_of,
                              const Get& get) {
  std::size_t count = 0;
  api.call(count_of, owner, &count);
  std::vector<const Item*> items(count);
  if (count > 0) api.call(get, owner, items.data(), count);
  return items;
}

std::vector<const OrtValueInfo*> inputs_of(const Api& api, const OrtNode* node) {
  return list<OrtValueInfo>(api, node, ort::Node_GetNumInputs, ort::Node_GetInputs);
}

std::vector<const OrtValueInfo*> outputs_of(const Api& api, const OrtNode* node) {
  return list<OrtValueInfo>(api, node, ort::Node_GetNumOutputs, ort::Node_GetOutputs);
}

template <typename Owner, typename Get>
std::string text(const Api& api, const Owner* owner, const Get& get) {
  const char* characters = nullptr;
  api.call(get, owner, &characters);
  return characters == nullptr ? "" : characters;
}

std::string name_of_value(const Api& api, const OrtValueInfo* value) {
  return value == nullptr ? "" : text(api, value, ort::GetValueInfoName);
}

std::vector<std::string> names_of_values(const Api& api,
                                         const std::vector<const OrtValueInfo*>& values) {
  std::vector<std::string> names;
  names.reserve(values.size());
  for (const OrtValueInfo* value : values) names.push_back(name_of_value(api, value));
  return names;
}

// ONNX's names of the element types, in the enumeration's order, for messages.
std::string word_of(ort::ONNXTensorElementDataType type) {
  static constexpr std::array kWords{"undefined",  "float",   "uint8",  "int8",   "uint16",
                                     "int16",      "int32",   "int64",  "string", "bool",
                                     "float16",    "double",  "uint32", "uint64", "complex64",
                                     "complex128", "bfloat16"};
  return type < kWords.size() ? kWords.at(type)
                              : "number " + std::to_string(type) + " (float8 or fewer bits)";
}

// Sets the value's type and shape. Returns the reason why no device can take them; empty if one
// can.
std::string read_type(const Api& api, const OrtValueInfo* info, Value& value) {
  const OrtTypeInfo* type_info = nullptr;
  const OrtTensorTypeAndShapeInfo* tensor = nullptr;
  api.call(ort::GetValueInfoTypeInfo, info, &type_info);
  if (type_info != nullptr) api.call(ort::CastTypeInfoToTensorInfo, type_info, &tensor);
  if (tensor == nullptr)
    return "value '" + value.name + "' is not a tensor, or its type is not known";

  ort::ONNXTensorElementDataType element = ort::ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED;
  api.call(ort::GetTensorElementType, tensor, &element);
  const std::optional<DataType> type = data_type_of(element);
  if (!type) {
    return "value '" + value.name + "' has type " + word_of(element) + ", which no device takes";
  }
  value.type = *type;

  if (!api.call(ort::TensorTypeAndShape_HasShape, tensor)) return "";
  std::size_t rank = 0;
  api.call(ort::GetDimensionsCount, tensor, &rank);
  if (rank > Shape::kMaxRank) {
    return "value '" + value.name + "' has rank " + std::to_string(rank) + ", above the " +
           std::to_string(Shape::kMaxRank) + " dimensions a device takes";
  }
  std::array<std::int64_t, Shape::kMaxRank> dims{};
  api.call(ort::GetDimensions, tensor, dims.data(), rank);
  value.shape = Shape(dims.data(), rank);
  return "";
}

// Calls ReadOpAttr twice: first without memory, which fails but says how many bytes are needed.
template <typename Element>
std::vector<Element> read_elements(const Api& api, const OrtOpAttr* attribute,
                                   ort::OrtOpAttrType type) {
  std::size_t needed = 0;
  try {
    api.call(ort::ReadOpAttr, attribute, type, nullptr, 0, &needed);
  } catch (const Error&) {
    if (needed == 0) throw;
  }
  std::vector<Element> elements(needed / sizeof(Element));
  if (!elements.empty()) {
    api.call(ort::ReadOpAttr, attribute, type, elements.data(), needed, &needed);
  }
  return elements;
}

template <typename Element>
Element read_element(const Api& api, const OrtOpAttr* attribute, ort::OrtOpAttrType type) {
  Element element{};
  std::size_t needed = 0;
  api.call(ort::ReadOpAttr, attribute, type, &element, sizeof element, &needed);
  return element;
}

// Reads a tensor attribute as a constant value.
Value read_tensor(const Api& api, const OrtOpAttr* attribute, std::string name) {
  OrtValue* tensor = nullptr;
  api.call(ort::OpAttr_GetTensorAttributeAsOrtValue, attribute, &tensor);
  const auto release = [api](OrtValue* held) { api.call(ort::ReleaseValue, held); };
  Value value{.name = std::move(name),
              .type = {},
              .shape = {},
              .constant = nullptr,
              .owner = std::shared_ptr<OrtValue>(tensor, release)};

  ort::ONNXTensorElementDataType element = ort::ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED;
  const std::int64_t* dims = nullptr;
  std::size_t rank = 0;
  api.call(ort::GetTensorElementTypeAndShapeDataReference, tensor, &element, &dims, &rank);
  const std::optional<DataType> type = data_type_of(element);
  if (!type) fail("'", value.name, "' has type ", word_of(element), ", which no device takes");
  value.type = *type;
  value.shape = Shape(dims, rank);
  api.call(ort::GetTensorData, tensor, &value.constant);
  return value;
}

std::optional<Attribute> read_attribute(const Api& api, const OrtOpAttr* attribute,
                                        ort::OrtOpAttrType type) {
  switch (type) {
    case ort::ORT_OP_ATTR_INT:
      return read_element<std::int64_t>(api, attribute, type);
    case ort::ORT_OP_ATTR_FLOAT:
      return read_element<float>(api, attribute, type);
    case ort::ORT_OP_ATTR_INTS:
      return read_elements<std::int64_t>(api, attribute, type);
    case ort::ORT_OP_ATTR_FLOATS:
      return read_elements<float>(api, attribute, type);
    case ort::ORT_OP_ATTR_STRING: {
      const std::vector<char> characters = read_elements<char>(api, attribute, type);
      return std::string(characters.begin(), characters.end());
    }
    default:
      return std::nullopt;
  }
}

// Appends the values. Returns the reason why no device can take one of them; empty if it can.
std::string read_values(const Api& api, Initializers& initializers,
                        const std::vector<const OrtValueInfo*>& infos, std::vector<Value>& values) {
  std::string unsupported;
  for (const OrtValueInfo* info : infos) {
    Value& value = values.emplace_back();
    value.name = name_of_value(api, info);
    if (value.name.empty() || !unsupported.empty()) continue;
    unsupported = read_type(api, info, value);
    if (unsupported.empty()) unsupported = initializers.read(info, value);
  }
  return unsupported;
}

// The attribute's type; undefined for the kinds that ORT's API does not know, such as types.
ort::OrtOpAttrType type_of(const Api& api, const OrtOpAttr* attribute) {
  ort::OrtOpAttrType type = ort::ORT_OP_ATTR_UNDEFINED;
  try {
    api.call(ort::OpAttr_GetType, attribute, &type);
  } catch (const Error&) {
    return ort::ORT_OP_ATTR_UNDEFINED;
  }
  return type;
}

// Reads the attributes; tensors among them are appended to the node's inputs, as constants. Returns
// the reason why no device can take one of the attributes; empty if it can.
std::string read_attributes(const Api& api, const OrtNode* handle, Node& node) {
  std::string unsupported;
  for (const OrtOpAttr* attribute :
       list<OrtOpAttr>(api, handle, ort::Node_GetNumAttributes, ort::Node_GetAttributes)) {
    const std::string name = text(api, attribute, ort::OpAttr_GetName);
    const ort::OrtOpAttrType type = type_of(api, attribute);
    if (type == ort::ORT_OP_ATTR_TENSOR) {
      // The name of an output makes the constant's name unique.
      const std::string unique = node.outputs.empty() ? name : node.outputs[0].name + "." + name;
      try {
        node.inputs.push_back(read_tensor(api, attribute, unique));
        node.tensor_attributes.push_back(name);
      } catch (const Error& error) {
        unsupported = "attribute " + std::string(error.what());
      }
    } else if (std::optional<Attribute> value = read_attribute(api, attribute, type)) {
      node.attributes.emplace(name, std::move(*value));
    } else if (node.op_type == kIf && node.domain.empty()) {
      // read_branches() reads the graphs.
    } else {
      unsupported =
          "attribute '" + name + "' is a graph, a type or a list of strings, which no device takes";
    }
  }
  return unsupported;
}

// Appends the outputs of one branch of an If, which must be constants, to the node's inputs.
// Returns why no device can take them; empty if it can.
std::string read_branch(const Api& api, Initializers& initializers, const OrtGraph* branch,
                        std::string_view name, Node& node) {
  std::string unsupported;
  for (const OrtValueInfo* info :
       list<OrtValueInfo>(api, branch, ort::Graph_GetNumOutputs, ort::Graph_GetOutputs)) {
    Value value;
    value.name = name_of_value(api, info);
    unsupported = read_type(api, info, value);
    if (unsupported.empty()) unsupported = initializers.read(info, value);
    if (unsupported.empty() && value.constant == nullptr)
      unsupported = "its " + std::string(name) + " computes '" + value.name +
                    "'; expected constants, between which it chooses";
    if (!unsupported.empty()) return unsupported;
    own(value);  // ORT frees the branches once the node is compiled.
    // Names are only unique within a branch.
    value.name = node.name + "." + std::string(name) + "." + value.name;
    node.tensor_attributes.emplace_back(name);
    node.inputs.push_back(std::move(value));
  }
  return "";
}

// Reads an If between constants: appends those of then_branch, then those of else_branch.
std::string read_branches(const Api& api, Initializers& initializers, const OrtNode* handle,
                          Node& node) {
  std::array<const OrtGraph*, 2> graphs{};
  std::array<const char*, 2> names{};
  api.call(ort::Node_GetSubgraphs, handle, graphs.data(), graphs.size(), names.data());
  if (std::string_view(names[0]) != "then_branch") {
    std::swap(graphs[0], graphs[1]);
    std::swap(names[0], names[1]);
  }
  std::string reason = read_branch(api, initializers, graphs[0], names[0], node);
  return reason.empty() ? read_branch(api, initializers, graphs[1], names[1], node) : reason;
}

std::size_t count_bodies(const Api& api, const OrtNode* handle, std::size_t subgraphs) {
  std::vector<const OrtGraph*> graphs(subgraphs);
  api.call(ort::Node_GetSubgraphs, handle, graphs.data(), subgraphs, nullptr);
  return static_cast<std::size_t>(std::ranges::count_if(graphs, [&](const OrtGraph* graph) {
    std::size_t nodes = 0;
    api.call(ort::Graph_GetNumNodes, graph, &nodes);
    return nodes > 0;
  }));
}

// The node's name in the model, or, if it has none, that of its first output.
std::string name_of_node(const Api& api, const OrtNode* handle, const std::vector<Value>& outputs) {
  std::string name = text(api, handle, ort::Node_GetName);
  for (const Value& output : outputs) {
    if (name.empty()) name = output.name;
  }
  return name;
}

GraphNode read_node(const Api& api, Initializers& initializers, const OrtNode* handle) {
  GraphNode result;
  result.handle = handle;
  Node& node = result.node;
  node.op_type = text(api, handle, ort::Node_GetOperatorType);
  node.domain = text(api, handle, ort::Node_GetDomain);
  if (node.domain == "ai.onnx") node.domain.clear();
  api.call(ort::Node_GetSinceVersion, handle, &node.since_version);
  for (const std::string& reason :
       {read_values(api, initializers, inputs_of(api, handle), node.inputs),
        read_values(api, initializers, outputs_of(api, handle), node.outputs),
        read_attributes(api, handle, node)}) {
    if (result.unsupported.empty()) result.unsupported = reason;
  }
  node.name = name_of_node(api, handle, node.outputs);

  const std::string provider = text(api, handle, ort::Node_GetEpName);
  result.is_elsewhere = !provider.empty() && provider != kEpName;

  std::size_t subgraphs = 0;
  api.call(ort::Node_GetNumSubgraphs, handle, &subgraphs);
  api.call(ort::Node_GetId, handle, &result.number);
  result.is_control_flow = is_control_flow(api, handle);
  if (result.is_control_flow) result.bodies = count_bodies(api, handle, subgraphs);
  if (node.op_type == kIf && node.domain.empty() && subgraphs == 2) {
    const std::string reason = read_branches(api, initializers, handle, node);
    if (result.unsupported.empty()) result.unsupported = reason;
  }
  if (subgraphs > 0) {
    result.has_subgraphs = true;
    for (const OrtValueInfo* info : list<OrtValueInfo>(api, handle, ort::Node_GetNumImplicitInputs,
                                                       ort::Node_GetImplicitInputs)) {
      result.implicit_inputs.push_back(name_of_value(api, info));
      bool is_constant = false;
      api.call(ort::ValueInfo_IsConstantInitializer, info, &is_constant);
      if (is_constant) result.implicit_constants.push_back(result.implicit_inputs.back());
    }
  }
  return result;
}

}  // namespace

ort::ONNXTensorElementDataType element_of(DataType type) {
  switch (type) {
    case DataType::kFloat32:
      return ort::ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT;
    case DataType::kFloat16:
      return ort::ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16;
    case DataType::kBFloat16:
      return ort::ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16;
    case DataType::kInt64:
      return ort::ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64;
    case DataType::kInt32:
      return ort::ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32;
    case DataType::kInt8:
      return ort::ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8;
    case DataType::kUInt8:
      return ort::ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8;
    case DataType::kBool:
      return ort::ONNX_TENSOR_ELEMENT_DATA_TYPE_BOOL;
    case DataType::kInt4:
      return ort::ONNX_TENSOR_ELEMENT_DATA_TYPE_INT4;
    case DataType::kUInt4:
      return ort::ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT4;
    case DataType::kFloat8E8M0:
      return ort::ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT8E8M0;
  }
  fail("expected a data type of this project, got number ", static_cast<int>(type));
}

std::optional<DataType> data_type_of(ort::ONNXTensorElementDataType type) {
  for (int ours = 0; ours < kDataTypes; ++ours) {
    if (element_of(static_cast<DataType>(ours)) == type) return static_cast<DataType>(ours);
  }
  return std::nullopt;
}

OperatorSets operator_sets(const Api& api, const OrtGraph* graph) {
  std::size_t count = 0;
  api.call(ort::Graph_GetNumOperatorSets, graph, &count);
  std::vector<const char*> domains(count);
  std::vector<std::int64_t> versions(count);
  api.call(ort::Graph_GetOperatorSets, graph, domains.data(), versions.data(), count);
  OperatorSets sets;
  for (std::size_t i = 0; i < count; ++i) sets.emplace_back(domains[i], versions[i]);
  return sets;
}

bool is_control_flow(const Api& api, const OrtNode* node) {
  const std::string domain = text(api, node, ort::Node_GetDomain);
  const std::string op_type = text(api, node, ort::Node_GetOperatorType);
  return (domain.empty() || domain == "ai.onnx") &&
         (op_type == kIf || op_type == "Loop" || op_type == "Scan");
}

std::vector<GraphNode> read_graph(const Api& api, const OrtGraph* graph) {
  Initializers initializers(api, model_path(api, graph));
  std::vector<GraphNode> nodes;
  for (const OrtNode* node :
       list<OrtNode>(api, graph, ort::Graph_GetNumNodes, ort::Graph_GetNodes)) {
    nodes.push_back(read_node(api, initializers, node));
  }
  return nodes;
}

std::string model_path(const Api& api, const OrtGraph* graph) {
  const ort::PathCharacter* path = nullptr;
  api.call(ort::Graph_GetModelPath, graph, &path);
  return path == nullptr ? "" : utf8_of(path);
}

std::vector<std::string> output_names(const Api& api, const OrtGraph* graph) {
  return names_of_values(
      api, list<OrtValueInfo>(api, graph, ort::Graph_GetNumOutputs, ort::Graph_GetOutputs));
}

std::vector<std::string> input_names(const Api& api, const OrtNode* node) {
  return names_of_values(api, inputs_of(api, node));
}

std::vector<std::string> output_names(const Api& api, const OrtNode* node) {
  return names_of_values(api, outputs_of(api, node));
}

}  // namespace flownpu
