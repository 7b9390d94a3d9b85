// SPDX-License-Identifier: Apache-2.0
// The RMS norm over each head of query and key moves into the attention:
//
//   FlowQKVAttention(Reshape(SimplifiedLayerNormalization(Reshape(query, [.., d]), wq), [.., H d]),
//                    Reshape(SimplifiedLayerNormalization(Reshape(key,   [.., d]), wk), [.., G d]),
//                    ..)
//       -> FlowQKVAttention(query, key, .., wq, wk; qk_norm_epsilon)
#include <algorithm>
#include <sstream>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "ops/lowering/lowering.h"
#include "ops/nodes/flow_qkv_attention.h"

namespace flownpu::lowering {
namespace {

constexpr float kDefaultEpsilon = 1e-5F;  // SimplifiedLayerNormalization's

// The nodes between query or key and the attention; a missing or different node is null.
struct HeadNorm {
  const Node* apart = nullptr;
  const Node* norm = nullptr;
  const Node* joined = nullptr;
  // Whether no other node reads the values between these nodes.
  bool alone = false;

  bool found() const { return apart != nullptr; }
  float epsilon() const { return norm->number("epsilon", kDefaultEpsilon); }
  std::int64_t axis() const { return norm->integer("axis", -1); }
};

HeadNorm head_norm(Graph& graph, const Value& value) {
  HeadNorm head;
  head.joined = graph.producer(value.name, "Reshape", "");
  if (head.joined == nullptr) return head;
  const std::string& normed = head.joined->inputs[0].name;
  head.norm = graph.producer(normed, "SimplifiedLayerNormalization", "");
  if (head.norm == nullptr || head.norm->inputs.size() < 2) return head;
  const std::string& reshaped = head.norm->inputs[0].name;
  head.apart = graph.producer(reshaped, "Reshape", "");
  head.alone = graph.readers(value.name) == 1 && graph.readers(normed) == 1 &&
               graph.readers(reshaped) == 1 && head.norm->outputs[0].name == normed;
  return head;
}

// Whether two Reshapes split [B, S, heads d] into heads, [B, S heads, d] or [B, S, heads, d], and
// join these again.
bool is_over_heads(const std::vector<std::int64_t>& apart, const std::vector<std::int64_t>& joined,
                   std::int64_t heads, std::int64_t d) {
  using Dims = std::vector<std::int64_t>;
  if (apart == Dims{0, -1, d}) return joined == Dims{0, -1, heads * d};
  const bool by_head = apart == Dims{0, 0, -1, d} || apart == Dims{0, 0, heads, d};
  return by_head && (joined == Dims{0, 0, -1} || joined == Dims{0, 0, heads * d});
}

// The reason why the attention cannot compute this as a norm over each head; empty if it can.
std::string obstacle_of(const HeadNorm& head, const std::string& name, std::int64_t heads,
                        std::int64_t d) {
  for (const Node* reshape : {head.apart, head.joined}) {
    if (reshape->integer("allowzero", 0) != 0)
      return "a Reshape has allowzero = 1: its zeros do not stand for the input's sizes";
  }
  const std::vector<std::int64_t> apart = constant_integers(head.apart->input(1));
  const std::vector<std::int64_t> joined = constant_integers(head.joined->input(1));
  // Other Reshapes might mix elements of different tokens.
  const auto& before = head.apart->inputs[0].shape;
  if (!is_over_heads(apart, joined, heads, d) || !before || before->rank() != 3 ||
      (*before)[2] != heads * d) {
    return name + " is reshaped to " + text_of(apart) + ", normed, and reshaped to " +
           text_of(joined) + ": expected a norm over each of " + std::to_string(heads) +
           " heads of " + std::to_string(d) + ", of [batch, tokens, " + std::to_string(heads * d) +
           "]";
  }
  const Value& weight = head.norm->inputs[1];
  if (weight.type != DataType::kFloat32 || !weight.shape || !(*weight.shape == Shape{d}))
    return name + "'s norm weight is not one of " + std::to_string(d) + " numbers";
  return "";
}

std::string obstacle_of(const Node& node, const HeadNorm& query, const HeadNorm& key) {
  if (node.input(kQNormWeight) != nullptr || node.input(kKNormWeight) != nullptr)
    return "the attention has norms of Q and K already";
  if (!query.found() || !key.found())
    return "only one of Q and K is reshaped, normed (SimplifiedLayerNormalization) and reshaped";
  if (!query.alone || !key.alone) return "something else reads Q or K on the way to the attention";
  const std::int64_t d = node.required_integer("head_size");
  for (const auto& [head, name, heads] :
       {std::tuple(&query, "q", node.required_integer("num_heads")),
        std::tuple(&key, "k", node.required_integer("kv_num_heads"))}) {
    if (std::string reason = obstacle_of(*head, name, heads, d); !reason.empty()) return reason;
  }
  if (query.epsilon() != key.epsilon()) {
    std::ostringstream text;
    text << "the norms of Q and K differ in epsilon: " << query.epsilon() << " and "
         << key.epsilon();
    return text.str();
  }
  if (const std::vector axes{query.axis(), key.axis()}; axes != std::vector<std::int64_t>{-1, -1})
    return "the norms' axes are " + text_of(axes) + ", expected the last one";
  return "";
}

}  // namespace

void qk_norm(Graph& graph) {
  graph.each("FlowQKVAttention", kDomain, [&](Node& node) {
    if (node.input(kQuery) == nullptr || node.input(kKey) == nullptr) return;
    const HeadNorm query = head_norm(graph, node.inputs[kQuery]);
    const HeadNorm key = head_norm(graph, node.inputs[kKey]);
    if (!query.found() && !key.found()) return;
    if (std::string reason = obstacle_of(node, query, key); !reason.empty())
      return graph.missed("qk_norm", node, std::move(reason));
    node.inputs.resize(std::max<std::size_t>(node.inputs.size(), kKNormWeight + 1));
    node.inputs[kQuery] = query.apart->inputs[0];
    node.inputs[kKey] = key.apart->inputs[0];
    node.inputs[kQNormWeight] = query.norm->inputs[1];
    node.inputs[kKNormWeight] = key.norm->inputs[1];
    node.attributes.insert_or_assign("qk_norm_epsilon", query.epsilon());
    graph.applied("qk_norm");
    graph.changed();
  });
}

}  // namespace flownpu::lowering
