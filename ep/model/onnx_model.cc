// SPDX-License-Identifier: Apache-2.0
#include "ep/model/onnx_model.h"

#include <array>
#include <bit>
#include <cstddef>
#include <map>
#include <span>
#include <string_view>
#include <type_traits>
#include <variant>

#include "ep/abi.h"
#include "ep/model/graph.h"
#include "ops/error.h"

namespace flownpu {
namespace {

// From onnx.proto. IR version 10 is the first with overloads of functions, and every supported ONNX
// Runtime reads it.
constexpr std::int64_t kIrVersion = 10;
// AttributeProto's types.
enum AttributeType : std::uint8_t { kFloat = 1, kInt, kString, kTensor, kGraph, kFloats, kInts };

// Writes a message of Protocol Buffers: each field is a key (number and wire type) and a value.
class Message {
 public:
  void integer(int field, std::int64_t value) {
    key(field, 0);
    varint(static_cast<std::uint64_t>(value));
  }
  void real(int field, float value) {
    key(field, 5);
    const auto bits = std::bit_cast<std::uint32_t>(value);
    for (int byte = 0; byte < 4; ++byte) bytes_ += static_cast<char>(bits >> (8 * byte));
  }
  void text(int field, std::string_view value) {
    key(field, 2);
    varint(value.size());
    bytes_ += value;
  }
  void message(int field, const Message& value) { text(field, value.bytes_); }
  const std::string& bytes() const { return bytes_; }

 private:
  void key(int field, unsigned wire_type) {
    varint(static_cast<std::uint64_t>(field) << 3 | wire_type);
  }
  void varint(std::uint64_t value) {
    for (; value >= 0x80; value >>= 7) bytes_ += static_cast<char>(value | 0x80);
    bytes_ += static_cast<char>(value);
  }

  std::string bytes_;
};

Message tensor(const Value& value) {
  Message message;
  const Shape shape = value.shape.value_or(Shape());
  for (const std::int64_t dim : shape) message.integer(1, dim);
  message.integer(2, element_of(value.type));
  const Tensor view{const_cast<void*>(value.constant), value.type, shape};
  message.text(9, {view.as<const char>(), view.bytes()});  // raw_data
  return message;
}

// A ValueInfoProto. `shape` may be null; if it is not, all its dimensions must be known.
Message value_info(std::string_view name, DataType type, const Shape* shape) {
  Message tensor_type;
  tensor_type.integer(1, element_of(type));
  if (shape != nullptr) {
    Message sizes;
    for (const std::int64_t size : *shape) {
      Message dimension;
      dimension.integer(1, size);
      sizes.message(1, dimension);
    }
    tensor_type.message(2, sizes);
  }
  Message of;
  of.message(1, tensor_type);
  Message message;
  message.text(1, name);
  message.message(2, of);
  return message;
}

Message named_attribute(std::string_view name, AttributeType type) {
  Message message;
  message.text(1, name);
  message.integer(20, type);
  return message;
}

Message attribute(std::string_view name, const Attribute& attribute) {
  constexpr std::array kTypes{kInt, kFloat, kString, kInts, kFloats};  // in the variant's order
  Message message = named_attribute(name, kTypes.at(attribute.index()));
  std::visit(
      [&](const auto& held) {
        using Held = std::decay_t<decltype(held)>;
        if constexpr (std::is_same_v<Held, std::int64_t>) {
          message.integer(3, held);
        } else if constexpr (std::is_same_v<Held, float>) {
          message.real(2, held);
        } else if constexpr (std::is_same_v<Held, std::string>) {
          message.text(4, held);
        } else if constexpr (std::is_same_v<Held, std::vector<float>>) {
          for (const float item : held) message.real(7, item);
        } else {
          for (const std::int64_t item : held) message.integer(8, item);
        }
      },
      attribute);
  return message;
}

// An attribute with a GraphProto without nodes, whose outputs are the constants.
Message branch(std::string_view name, std::span<const Value> constants) {
  Message graph;
  graph.text(2, name);
  for (const Value& value : constants) {
    Message constant = tensor(value);
    constant.text(8, value.name);
    graph.message(5, constant);
    const Shape shape = value.shape.value_or(Shape());
    graph.message(12, value_info(value.name, value.type, &shape));
  }
  Message message = named_attribute(name, kGraph);
  message.message(6, graph);
  return message;
}

Message node_message(const Node& node) {
  Message message;
  const std::size_t inputs = node.inputs.size() - node.tensor_attributes.size();
  for (std::size_t i = 0; i < inputs; ++i) message.text(1, node.inputs[i].name);
  for (const Value& output : node.outputs) message.text(2, output.name);
  message.text(3, node.name);
  message.text(4, node.op_type);
  for (const auto& [name, value] : node.attributes) message.message(5, attribute(name, value));
  const auto constants = std::span(node.inputs).subspan(inputs);
  const bool chooses = node.op_type == kIf && node.domain.empty();
  if (chooses) {
    message.message(5, branch("then_branch", constants.first(node.outputs.size())));
    message.message(5, branch("else_branch", constants.last(node.outputs.size())));
  }
  for (std::size_t i = 0; i < node.tensor_attributes.size() && !chooses; ++i) {
    Message held = named_attribute(node.tensor_attributes[i], kTensor);
    held.message(5, tensor(node.inputs[inputs + i]));
    message.message(5, held);
  }
  message.text(7, node.domain);
  return message;
}

}  // namespace

std::string onnx_model(const std::vector<Node>& nodes, const std::vector<std::string>& inputs,
                       const std::vector<std::string>& outputs,
                       const std::set<std::string>& constants, const OperatorSets& opsets) {
  std::map<std::string, const Value*> values;
  Message graph;
  for (const Node& node : nodes) {
    graph.message(1, node_message(node));
    for (const auto* ports : {&node.inputs, &node.outputs})
      for (const Value& value : *ports) values.emplace(value.name, &value);
  }
  graph.text(2, "partition");
  const auto list = [&](int field, const std::vector<std::string>& names) {
    for (const std::string& name : names) {
      const auto found = values.find(name);
      if (found == values.end()) fail("[FlowNPU] value '", name, "' is none of its partition");
      const Value& value = *found->second;
      const bool has_shape = constants.contains(name) && value.shape;
      graph.message(field, value_info(name, value.type, has_shape ? &*value.shape : nullptr));
    }
  };
  list(11, inputs);
  list(12, outputs);
  Message model;
  model.integer(1, kIrVersion);
  model.message(7, graph);
  for (const auto& [domain, version] : opsets) {
    Message opset;
    opset.text(1, domain);
    opset.integer(2, version);
    model.message(8, opset);
  }
  return model.bytes();
}

}  // namespace flownpu
