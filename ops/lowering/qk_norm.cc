// SPDX-License-Identifier: Apache-2.0
// The RMS norm over each head of query and key moves into the attention:
//
//   FlowQKVAttention(Reshape(SimplifiedLayerNormalization(Reshape(query, [.., d]), wq), [.., H d]),
//                    Reshape(SimplifiedLayerNormalization(Reshape(key,   [.., d]), wk), [.., G d]),
//                    ..)
//       -> FlowQKVAttention(query, key, .., wq, wk; qk_norm_epsilon)
#include <algorithm>
#include <optional>
#include <vector>

#include "ops/lowering/lowering.h"

namespace flownpu::lowering {
namespace {

constexpr std::size_t kInputs = 13;
constexpr std::size_t kQueryNorm = 11;
constexpr std::size_t kKeyNorm = 12;
constexpr float kDefaultEpsilon = 1e-5F;  // SimplifiedLayerNormalization's

struct HeadNorm {
  Value before;  // [B, S, heads d]
  Value weight;
  float epsilon = 0;
};

// Whether two Reshapes cut [B, S, heads d] into heads and restore it: as [B, S heads, d] or
// [B, S, heads, d].
bool is_over_heads(const std::vector<std::int64_t>& apart, const std::vector<std::int64_t>& joined,
                   std::int64_t heads, std::int64_t d) {
  using Dims = std::vector<std::int64_t>;
  if (apart == Dims{0, -1, d}) return joined == Dims{0, -1, heads * d};
  const bool by_head = apart == Dims{0, 0, -1, d} || apart == Dims{0, 0, heads, d};
  return by_head && (joined == Dims{0, 0, -1} || joined == Dims{0, 0, heads * d});
}

// The norm that ends in `value`, if that is what makes it, for this attention alone.
std::optional<HeadNorm> head_norm(Graph& graph, const Value& value, std::int64_t heads,
                                  std::int64_t d) {
  const Node* joined = graph.only_producer(value.name, "Reshape", "");
  if (joined == nullptr) return std::nullopt;
  const Node* norm =
      graph.only_producer(joined->inputs[0].name, "SimplifiedLayerNormalization", "");
  if (norm == nullptr || norm->inputs.size() < 2) return std::nullopt;
  const Node* apart = graph.only_producer(norm->inputs[0].name, "Reshape", "");
  if (apart == nullptr || norm->integer("axis", -1) != -1) return std::nullopt;
  for (const Node* reshape : {apart, joined}) {
    if (reshape->integer("allowzero", 0) != 0) return std::nullopt;
  }
  // Of what else is reshaped to heads and back, tokens might become others.
  const Value& before = apart->inputs[0];
  if (!before.shape || before.shape->rank() != 3 || (*before.shape)[2] != heads * d)
    return std::nullopt;
  const Value& weight = norm->inputs[1];
  if (weight.type != DataType::kFloat32 || !weight.shape || !(*weight.shape == Shape{d}))
    return std::nullopt;
  if (!is_over_heads(constant_integers(apart->input(1)), constant_integers(joined->input(1)), heads,
                     d)) {
    return std::nullopt;
  }
  return HeadNorm{before, weight, norm->number("epsilon", kDefaultEpsilon)};
}

}  // namespace

void qk_norm(Graph& graph) {
  graph.each("FlowQKVAttention", kDomain, [&](Node& node) {
    if (node.input(1) == nullptr || node.input(kQueryNorm) != nullptr) return;
    const std::int64_t d = node.required_integer("head_size");
    const auto query = head_norm(graph, node.inputs[0], node.required_integer("num_heads"), d);
    const auto key = head_norm(graph, node.inputs[1], node.required_integer("kv_num_heads"), d);
    if (!query || !key || query->epsilon != key->epsilon) return;
    node.inputs.resize(std::max(node.inputs.size(), kInputs));
    node.inputs[0] = query->before;
    node.inputs[1] = key->before;
    node.inputs[kQueryNorm] = query->weight;
    node.inputs[kKeyNorm] = key->weight;
    node.attributes.insert_or_assign("qk_norm_epsilon", query->epsilon);
    graph.changed();
  });
}

}  // namespace flownpu::lowering
