// SPDX-License-Identifier: Apache-2.0
// Products with a constant weight, and what follows them, -> DenseMatMul:
//
//   MatMul(X, W), Gemm(X, W, C)                          -> DenseMatMul(X, W, -, C), C its bias or
//                                                        residual
//   W = Cast(constant), DequantizeLinear(constant, s)    -> the constant itself, and its scale s
//   Reshape(DenseMatMul(Reshape(X, [-1, K]), ..), ..)    -> DenseMatMul(X, ..)
//   Add(DenseMatMul(..), bias), Gelu(DenseMatMul(..)) or FastGelu or BiasGelu,
//   Add(DenseMatMul(..), residual)
//                                                        -> DenseMatMul with bias, activation,
//                                                        residual
#include <algorithm>
#include <string>

#include "ops/lowering/lowering.h"

namespace flownpu::lowering {
namespace {

enum Input : std::uint8_t { kX, kWeight, kScale, kBias, kResidual, kInputs };

// The shape of a constant; null if `value` is no constant, or its shape is unknown.
const Shape* constant_shape(const Value* value) {
  if (value == nullptr || value->constant == nullptr || !value->shape) return nullptr;
  return &*value->shape;
}

bool is_vector(const Value& value, std::int64_t elements) {
  const Shape* shape = constant_shape(&value);
  return shape != nullptr && value.type == DataType::kFloat32 && shape->rank() > 0 &&
         shape->elements() == elements && (*shape)[-1] == elements;
}

// A weight as the file stores it, of K rows and M columns (or transposed). `value` has no name if
// DenseMatMul does not take the weight.
struct Weight {
  Value value;
  Value scale;
  std::int64_t k = 0;
  std::int64_t m = 0;
};

// The scales of DequantizeLinear(x, scale[M] or scale) along `axis` whose zero points are all 0, as
// a vector of M; without a name where it is another.
Value symmetric_scale(Graph& graph, const Node& node, int axis) {
  const Value* x = node.input(0);
  const Value* scale = node.input(1);
  const Shape* shape = constant_shape(x);
  if (shape == nullptr || x->type != DataType::kInt8 || shape->rank() != 2 || scale == nullptr ||
      node.integer("block_size", 0) != 0 || !is_zero(node.input(2))) {
    return {};
  }
  const std::int64_t given = node.integer("axis", 1);
  const bool is_along = (given < 0 ? given + 2 : given) == axis;
  const bool is_one = scale->shape && scale->shape->elements() == 1;
  return is_along || is_one ? columns_of(graph, *scale, (*shape)[axis]) : Value{};
}

Weight weight_of(Graph& graph, const Value& value, bool transposed) {
  Weight weight;
  const Node* maker = value.constant == nullptr ? graph.producer(value.name) : nullptr;
  const Value* source = maker == nullptr ? &value : maker->input(0);
  const Shape* shape = constant_shape(source);
  if (maker != nullptr) {
    const bool cast = maker->op_type == "Cast" && maker->domain.empty() &&
                      maker->outputs[0].type == DataType::kFloat32 && shape != nullptr &&
                      (source->type == DataType::kBFloat16 || source->type == DataType::kFloat16);
    if (maker->op_type == "DequantizeLinear" && maker->domain.empty())
      weight.scale = symmetric_scale(graph, *maker, transposed ? 0 : 1);
    if (!cast && weight.scale.name.empty()) return weight;
  } else if (value.type != DataType::kFloat32) {
    return weight;
  }
  if (shape == nullptr || shape->rank() != 2) return weight;
  weight.value = *source;
  weight.k = (*shape)[transposed ? 1 : 0];
  weight.m = (*shape)[transposed ? 0 : 1];
  return weight;
}

void become_product(Node& node, const Weight& weight, bool transposed, Value bias, Value residual) {
  std::vector<Value> inputs{node.inputs[0], weight.value, weight.scale, std::move(bias),
                            std::move(residual)};
  node.op_type = "DenseMatMul";
  node.domain = kDomain;
  node.since_version = 1;
  node.attributes = {{"transposed", std::int64_t{transposed}}};
  node.inputs = std::move(inputs);
}

void matmul(Graph& graph, Node& node) {
  const Weight weight = weight_of(graph, node.inputs[1], false);
  if (!weight.value.name.empty()) become_product(node, weight, false, {}, {});
}

// Whether C of a Gemm has as many elements as the product, as far as is known. ORT's
// MatMulAddFusion makes such Gemms of MatMul(X, W) + Z.
bool is_residual(const Value& c, const Value& x, std::int64_t columns) {
  return c.type == DataType::kFloat32 && c.shape && x.shape && c.shape->rank() == 2 &&
         (*c.shape)[0] == (*x.shape)[0] && (*c.shape)[1] == columns;
}

void gemm(Graph& graph, Node& node) {
  if (node.integer("transA", 0) != 0 || node.number("alpha", 1) != 1 || node.number("beta", 1) != 1)
    return;
  const bool transposed = node.integer("transB", 0) != 0;
  const Weight weight = weight_of(graph, node.inputs[1], transposed);
  if (weight.value.name.empty()) return;
  const Value c = input_or_none(node, 2);
  if (c.name.empty() || is_vector(c, weight.m)) {
    become_product(node, weight, transposed, c, {});
  } else if (is_residual(c, node.inputs[0], weight.m)) {
    become_product(node, weight, transposed, {}, c);
  }
}

// The DenseMatMul that makes `value`, if nothing but one node reads it; null otherwise.
Node* product_of(Graph& graph, const Value& value) {
  return graph.only_producer(value.name, "DenseMatMul", kDomain);
}

bool has(const Node& product, Input input) { return product.input(input) != nullptr; }
bool is_activated(const Node& product) { return product.text("activation", "none") != "none"; }
std::int64_t columns_of(const Node& product) {
  const Shape shape = product.inputs[kWeight].shape.value_or(Shape{-1, -1});
  return shape[product.integer("transposed", 0) != 0 ? 0 : 1];
}

// Turns `node`, which reads the product's output, into the product with the node's own output. The
// topological order stays valid, because `node` comes after all inputs of `product`.
void take_over(Graph& graph, Node& node, const Node& product) {
  node.name = product.name;
  node.op_type = product.op_type;
  node.domain = product.domain;
  node.since_version = product.since_version;
  node.attributes = product.attributes;
  node.inputs = product.inputs;
  node.inputs.resize(kInputs);
  graph.changed();
}

// Whether `to` is the shape `from` = [.., K] with its last axis replaced by M, as far as is known.
// At most one of the other axes may have an unknown length, which then follows from the others.
bool is_product_shape(const std::optional<Shape>& from, const std::optional<Shape>& to) {
  if (!from || !to || from->rank() != to->rank()) return false;
  int unknown = 0;
  for (int axis = 0; axis + 1 < from->rank(); ++axis) {
    if ((*from)[axis] != (*to)[axis]) return false;
    unknown += (*from)[axis] < 0 ? 1 : 0;
  }
  return unknown <= 1;
}

// Removes the Reshapes around a product: ORT's MatMulAddFusion reshapes X to two axes for Gemm, and
// the result back.
void flattened(Graph& graph, Node& node) {
  Node* product = product_of(graph, node.inputs[0]);
  if (product == nullptr || has(*product, kResidual)) return;
  const Node* before = graph.producer(product->inputs[kX].name);
  if (before == nullptr || before->op_type != "Reshape" || !before->domain.empty()) return;
  const Value x = before->inputs[0];
  const Shape* weight = constant_shape(&product->inputs[kWeight]);
  if (weight == nullptr) return;
  const std::int64_t k = (*weight)[product->integer("transposed", 0) != 0 ? 1 : 0];
  if (!x.shape || x.shape->rank() < 2 || (*x.shape)[-1] != k ||
      !is_product_shape(x.shape, node.outputs[0].shape)) {
    return;
  }
  take_over(graph, node, *product);
  node.inputs[kX] = x;
}

// An Add of a product and another operand; both null if neither operand is a product.
struct Sum {
  Node* product = nullptr;
  const Value* addend = nullptr;
};
Sum sum_of(Graph& graph, const Node& node, bool (*fits)(const Node& product, const Value& addend)) {
  for (const int side : {0, 1}) {
    Node* product = product_of(graph, node.inputs[side]);
    const Value& addend = node.inputs[1 - side];
    if (product != nullptr && !has(*product, kResidual) && fits(*product, addend))
      return {product, &addend};
  }
  return {};
}

// Whether the sum has as many axes as the product: a bias [1,1,M] would make three axes of two.
bool adds_no_axes(const Value& product, const Value& addend) {
  const int added = addend.shape.value_or(Shape()).rank();
  return added == 1 || added <= product.shape.value_or(Shape()).rank();
}

void bias(Graph& graph, Node& node) {
  const Sum sum = sum_of(graph, node, [](const Node& product, const Value& addend) {
    return !has(product, kBias) && !is_activated(product) &&
           is_vector(addend, columns_of(product)) && adds_no_axes(product.outputs[0], addend);
  });
  if (sum.product == nullptr) return;
  const Value value = *sum.addend;
  take_over(graph, node, *sum.product);
  node.inputs[kBias] = value;
}

void residual(Graph& graph, Node& node) {
  const Sum sum = sum_of(graph, node, [](const Node& /*product*/, const Value& addend) {
    return addend.type == DataType::kFloat32;
  });
  if (sum.product == nullptr) return;
  const Value value = *sum.addend;
  take_over(graph, node, *sum.product);
  node.inputs[kResidual] = value;
}

// Gelu, FastGelu and BiasGelu; the latter two may have a bias.
void activation(Graph& graph, Node& node) {
  Node* product = product_of(graph, node.inputs[0]);
  if (product == nullptr || has(*product, kResidual) || is_activated(*product)) return;
  const Value added = input_or_none(node, 1);
  if (!added.name.empty() && (has(*product, kBias) || !is_vector(added, columns_of(*product))))
    return;
  const bool approximate = node.op_type == "FastGelu" || node.text("approximate", "none") == "tanh";
  take_over(graph, node, *product);
  if (!added.name.empty()) node.inputs[kBias] = added;
  node.attributes.insert_or_assign("activation", std::string(approximate ? "gelu_tanh" : "gelu"));
}

}  // namespace

void dense_matmul(Graph& graph) {
  const auto apply = [&graph](std::string_view op_type, std::string_view domain, const auto& rule) {
    graph.each(op_type, domain, [&](Node& node) { rule(graph, node); });
  };
  apply("MatMul", "", matmul);
  apply("Gemm", "", gemm);
  graph.changed();
  apply("Reshape", "", flattened);
  apply("Add", "", bias);
  apply("Gelu", "", activation);
  for (const std::string_view op_type : {"Gelu", "FastGelu", "BiasGelu"})
    apply(op_type, "com.microsoft", activation);
  apply("Add", "", residual);
}

}  // namespace flownpu::lowering
