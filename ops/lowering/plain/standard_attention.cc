// SPDX-License-Identifier: Apache-2.0
// Attention of activations in simple operators, so that its scores are not stored:
//
//   MatMul(Softmax(Add(Mul(MatMul(Q, Kt), scale), mask)), V)  -> Attention(Q, K, V, mask; scale)
//
// with Q [B, H, S, d], Kt [B, H, d, T] = Transpose(K), V [B, H, T, d]. The Mul may be a Div, and it
// and the Add may be absent; a known number that multiplies Q or Kt joins the scale. Softmax may be
// that of any precision, so bf16 kernels may compute: as in FlowQKVAttention, which has no cache
// either.
#include <algorithm>
#include <cmath>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ops/lowering/lowering.h"
#include "ops/nodes/kv_cache.h"

namespace flownpu::lowering {
namespace {

// Scores of so many queries and keys stay in a second-level cache, whatever they are: there is
// little to win, and nothing is rounded.
constexpr std::int64_t kFewScores = 64 * 64;
// A TensorProto's BFLOAT16.
constexpr std::int64_t kBFloat16Precision = 16;

struct Scores {
  const Node* product = nullptr;
  float scale = 1;
  Value mask;
};

// A constant number of one element; nullopt if it is none.
std::optional<float> number_of(const Value& value) {
  if (value.constant == nullptr || value.type != DataType::kFloat32 || !value.shape ||
      value.shape->elements() != 1) {
    return std::nullopt;
  }
  return *static_cast<const float*>(value.constant);
}

// The scores that a softmax reads; without a product if they are others.
Scores scores_of(Graph& graph, const Value& value) {
  Scores scores;
  std::string name = value.name;
  if (const Node* sum = graph.only_producer(name, "Add", ""); sum != nullptr) {
    for (const std::size_t side : {0, 1}) {
      const std::string& other = sum->inputs[side].name;
      const bool is_product = graph.only_producer(other, "MatMul", "") != nullptr ||
                              graph.only_producer(other, "Mul", "") != nullptr ||
                              graph.only_producer(other, "Div", "") != nullptr;
      if (!is_product || !scores.mask.name.empty()) continue;
      scores.mask = sum->inputs[1 - side];
      name = other;
    }
    if (scores.mask.name.empty()) return {};
  }
  for (const std::string_view op_type : {"Mul", "Div"}) {
    const Node* scaled = graph.only_producer(name, op_type, "");
    if (scaled == nullptr) continue;
    const std::optional<float> number = number_of(scaled->inputs[1]);
    if (!number || *number == 0) return {};
    scores.scale = op_type == "Mul" ? *number : 1 / *number;
    name = scaled->inputs[0].name;
  }
  scores.product = graph.only_producer(name, "MatMul", "");
  return scores;
}

std::optional<Shape> sizes_of(Graph& graph, const Value& value);

// Integers that constants and known sizes make, as exporters compute a head's size; -1: an unknown
// one, none: other values.
std::vector<std::int64_t> known_integers(Graph& graph, const Value& value) {
  if (std::vector<std::int64_t> numbers = constant_integers(&value); !numbers.empty())
    return numbers;
  const Node* node = graph.producer(value.name);
  if (node == nullptr || !node->domain.empty()) return {};
  if (node->op_type == "Shape") {
    const Value& whole = node->inputs[0];
    const Shape sizes = sizes_of(graph, whole).value_or(whole.shape.value_or(Shape()));
    if (node->integer("start", 0) != 0 || node->attributes.contains("end")) return {};
    return {sizes.begin(), sizes.end()};
  }
  std::vector<std::int64_t> list = known_integers(graph, node->inputs[0]);
  for (const std::string_view same : {"Unsqueeze", "Squeeze", "Cast", "Identity"}) {
    if (node->op_type == same) return list;
  }
  const std::vector<std::int64_t> other = constant_integers(node->input(1));
  const auto size = static_cast<std::int64_t>(list.size());
  const auto place = [size](std::int64_t index) { return index < 0 ? index + size : index; };
  if (node->op_type == "Gather") {
    std::vector<std::int64_t> found;
    for (const std::int64_t index : other) {
      if (place(index) < 0 || place(index) >= size) return {};
      found.push_back(list[static_cast<std::size_t>(place(index))]);
    }
    return found;
  }
  if (node->op_type == "Slice") {
    const std::vector<std::int64_t> ends = constant_integers(node->input(2));
    if (other.size() != 1 || ends.size() != 1 || node->input(4) != nullptr) return {};
    const std::int64_t begin = std::clamp<std::int64_t>(place(other[0]), 0, size);
    const std::int64_t end = std::clamp<std::int64_t>(place(ends[0]), begin, size);
    return {list.begin() + begin, list.begin() + end};
  }
  if (node->op_type == "Div" || node->op_type == "Mul") {
    const std::vector<std::int64_t> factor = known_integers(graph, node->inputs[1]);
    if (list.size() != 1 || factor.size() != 1 || list[0] < 0 || factor[0] <= 0) return {};
    return {node->op_type == "Div" ? list[0] / factor[0] : list[0] * factor[0]};
  }
  return {};
}

// The only one; -1: unknown.
std::int64_t known_integer(Graph& graph, const Value& value) {
  const std::vector<std::int64_t> numbers = known_integers(graph, value);
  return numbers.size() == 1 ? numbers[0] : -1;
}

// A number above 0 that constants and a head's size make, as a root of it; 0: unknown.
float known_number(Graph& graph, const Value& value) {
  if (const std::optional<float> number = number_of(value)) return std::max(*number, 0.0F);
  const Node* node = graph.producer(value.name);
  if (node == nullptr || !node->domain.empty()) return 0;
  if (node->op_type == "Cast" && value.type == DataType::kFloat32)
    return static_cast<float>(std::max<std::int64_t>(known_integer(graph, node->inputs[0]), 0));
  if (node->op_type != "Sqrt" && node->op_type != "Div") return 0;
  const float first = known_number(graph, node->inputs[0]);
  if (node->op_type == "Sqrt") return std::sqrt(first);
  const float second = known_number(graph, node->inputs[1]);
  return second == 0 ? 0 : first / second;
}

// Replaces a product by a known number by what it multiplies, and returns the number.
float take_factor(Graph& graph, Value& value) {
  const Node* product = graph.producer(value.name, "Mul", "");
  const float number = product == nullptr ? 0 : known_number(graph, product->inputs[1]);
  if (number == 0) return 1;
  value = product->inputs[0];
  return number;
}

// The sizes of 4 axes of heads, of which nodes before may know more than the value; -1: unknown.
std::optional<Shape> sizes_of(Graph& graph, const Value& value) {
  if (!value.shape || value.shape->rank() != 4 || value.type != DataType::kFloat32 ||
      value.constant != nullptr) {
    return std::nullopt;
  }
  Shape sizes = *value.shape;
  const Node* node = graph.producer(value.name);
  if (node == nullptr || !node->domain.empty()) return sizes;
  std::optional<Shape> found;
  if (node->op_type == "Mul") {
    const Value& factor = node->inputs[1];
    if (factor.shape && factor.shape->rank() < 2 && factor.shape->elements() == 1)
      found = sizes_of(graph, node->inputs[0]);
  } else if (node->op_type == "Transpose") {
    const std::vector<std::int64_t> order = node->integers("perm");
    const std::optional<Shape> before = sizes_of(graph, node->inputs[0]);
    if (before && order.size() == 4) {
      found = before;
      for (int axis = 0; axis < 4; ++axis)
        (*found)[axis] = (*before)[static_cast<int>(order[static_cast<std::size_t>(axis)])];
    }
  } else if (node->op_type == "Reshape") {
    const Node* list = graph.producer(node->inputs[1].name);
    if (list != nullptr && list->op_type == "Concat" && list->inputs.size() == 4) {
      found = sizes;
      for (int axis = 0; axis < 4; ++axis)
        (*found)[axis] = known_integer(graph, list->inputs[static_cast<std::size_t>(axis)]);
    }
  }
  for (int axis = 0; found && axis < 4; ++axis) {
    if (sizes[axis] < 0 && (*found)[axis] > 0) sizes[axis] = (*found)[axis];
  }
  return sizes;
}

// Whether a mask has the axes and types of Attention's. Its sizes are compared in each run.
bool is_mask(const Value& mask) {
  return mask.name.empty() || (mask.type == DataType::kFloat32 && mask.shape &&
                               mask.shape->rank() >= 2 && mask.shape->rank() <= 4);
}

// K, of which `transposed` is the transpose [B, H, d, T].
Value keys_of(Graph& graph, const Node& before, const Value& transposed) {
  Node made;
  made.op_type = "Transpose";
  made.since_version = 13;
  std::vector<std::int64_t> order{0, 1, 3, 2};
  Value source = transposed;
  if (const Node* maker = graph.producer(transposed.name);
      maker != nullptr && maker->op_type == "Transpose" && maker->domain.empty()) {
    const std::vector<std::int64_t> first = maker->integers("perm");
    if (first.size() == 4) {
      source = maker->inputs[0];
      for (std::int64_t& axis : order) axis = first[static_cast<std::size_t>(axis)];
    }
  }
  Value keys = transposed;
  keys.name = graph.unique_name(transposed.name + "_by_key");
  const Shape sizes = transposed.shape.value_or(Shape{-1, -1, -1, -1});
  keys.shape = Shape{sizes[0], sizes[1], sizes[3], sizes[2]};
  made.name = keys.name;
  made.attributes = {{"perm", order}};
  made.inputs = {source};
  made.outputs = {keys};
  graph.insert_before(before, std::move(made));
  return keys;
}

void attention(Graph& graph, Node& node) {
  const Node* softmax = graph.only_producer(node.inputs[0].name, "Softmax", "");
  if (softmax == nullptr) return;
  const std::int64_t axis = softmax->integer("axis", softmax->since_version < 13 ? 1 : -1);
  const Scores scores = scores_of(graph, softmax->inputs[0]);
  if ((axis != -1 && axis != 3) || scores.product == nullptr) return;
  Value query = scores.product->inputs[0];
  Value transposed = scores.product->inputs[1];
  Value value = node.inputs[1];
  const std::optional<Shape> q = sizes_of(graph, query);
  const std::optional<Shape> k = sizes_of(graph, transposed);
  const std::optional<Shape> v = sizes_of(graph, value);
  if (!q || !k || !v) return;
  const std::int64_t heads = (*q)[1];
  const std::int64_t head_size = (*q)[3];
  const bool are_alike = heads > 0 && head_size > 0 && (*k)[1] == heads && (*v)[1] == heads &&
                         (*k)[2] == head_size && (*v)[3] == head_size;
  if (!are_alike || head_size > kMaxHeadSize || !is_mask(scores.mask)) {
    graph.missed("standard_attention", node,
                 "expected Q, K and V of as many heads of one known size up to " +
                     std::to_string(kMaxHeadSize) + ", and a mask of float32");
    return;
  }
  const std::int64_t queries = (*q)[2];
  const std::int64_t keys = (*v)[2];
  if (queries >= 0 && keys >= 0 && queries * keys < kFewScores) return;
  const float factors = take_factor(graph, query) * take_factor(graph, transposed);
  query.shape = q;
  value.shape = v;
  transposed.shape = k;
  const Value key = keys_of(graph, node, transposed);
  node.op_type = "Attention";
  node.since_version = 23;
  node.attributes = {{"scale", scores.scale * factors}, {"softmax_precision", kBFloat16Precision}};
  node.inputs = {query, key, value};
  if (!scores.mask.name.empty()) node.inputs.push_back(scores.mask);
  graph.changed();
  graph.applied("standard_attention");
}

}  // namespace

void standard_attention(Graph& graph) {
  graph.each("MatMul", "", [&](Node& node) { attention(graph, node); });
}

}  // namespace flownpu::lowering
