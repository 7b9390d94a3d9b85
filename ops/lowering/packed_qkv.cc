// SPDX-License-Identifier: Apache-2.0
// One product reads the activations once and writes query, key and value side by side:
//
//   FlowQKVAttention(Q4NXMatMul(X, Wq[, bq]), Q4NXMatMul(X, Wk[, bk]), Q4NXMatMul(X, Wv[, bv]), ..)
//       -> FlowQKVAttention(Q4NXMatMul(X, [Wq; Wk; Wv][, [bq; bk; bv]]), -, -, ..)
//
// Where query or key is normalised before its heads are parted (OLMo 2), a Split of the product
// makes what the three products made.
//
// The weights are stacked in whole blocks of 32 rows, so Wq and Wk must have multiples of 32 rows.
#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "ops/formats/q4nx.h"
#include "ops/lowering/lowering.h"
#include "ops/nodes/flow_qkv_attention.h"
#include "ops/nodes/q4nx_matmul.h"

namespace flownpu::lowering {
namespace {

using Projections = std::array<Node*, 3>;

// The norm of all heads that makes the value; null if there is none.
const Node* norm_of(Graph& graph, std::string_view value) {
  return graph.only_producer(value, "SimplifiedLayerNormalization", "");
}

bool is_biased(const Node* projection) {
  const Value* bias = projection->input(kProductBias);
  return bias != nullptr && bias->constant != nullptr && bias->type == DataType::kFloat32 &&
         bias->shape && bias->shape->elements() == projection->required_integer("M");
}

// Why the three products cannot become one; empty if they can.
std::string obstacle_of(Graph& graph, const RepackedWeights& weights, const Node& node,
                        const Projections& projections) {
  const std::int64_t d = node.required_integer("head_size");
  const std::int64_t keys = node.required_integer("kv_num_heads") * d;
  const std::array<std::int64_t, 3> widths{node.required_integer("num_heads") * d, keys, keys};
  const bool biased = std::ranges::all_of(projections, is_biased);
  std::array<std::int64_t, 3> rows{};
  for (std::size_t i = 0; i < 3; ++i) {
    const Node& projection = *projections[i];
    rows[i] = projection.required_integer("M");
    if (std::string reason = epilogue_of(projection, biased); !reason.empty()) return reason;
    if (projection.inputs[kProductX].name != projections[0]->inputs[kProductX].name)
      return "Q, K and V are products of different values, expected one that all of them read";
    if (graph.readers(projection.outputs[0].name) != 1)
      return "something else than the attention, or its norms, reads Q, K or V";
    if (rows[i] != widths[i]) {
      return "Q, K or V has " + std::to_string(rows[i]) + " rows, expected " +
             std::to_string(widths[i]) + ": those of the attention's heads";
    }
  }
  if (rows[0] % q4nx::kBlockRows != 0 || rows[1] % q4nx::kBlockRows != 0) {
    return "Q and K have " + std::to_string(rows[0]) + " and " + std::to_string(rows[1]) +
           " rows, expected multiples of " + std::to_string(q4nx::kBlockRows);
  }
  return weights.join_obstacle({projections.begin(), projections.end()});
}

// A constant of the three biases, one after the other.
Value joined_bias(Graph& graph, const Projections& projections) {
  Value joined = projections[0]->inputs[kProductBias];
  std::int64_t size = 0;
  for (const Node* projection : projections) size += projection->required_integer("M");
  auto memory = std::make_shared<float[]>(static_cast<std::size_t>(size));
  float* end = memory.get();
  for (const Node* projection : projections) {
    const auto count = static_cast<std::size_t>(projection->required_integer("M"));
    std::memcpy(end, projection->inputs[kProductBias].constant, count * sizeof(float));
    end += count;
  }
  joined.name = graph.unique_name(joined.name + "_QKV");
  joined.shape = Shape{size};
  joined.constant = memory.get();
  joined.owner = std::move(memory);
  return joined;
}

// Puts the product of all in the place of the first of the projections, and behind it a Split,
// whose parts the readers of the three products read.
void split_product(Graph& graph, const Projections& projections, Node packed) {
  Node* first = nullptr;
  graph.each("Q4NXMatMul", kDomain, [&](Node& node) {
    if (first == nullptr && std::ranges::find(projections, &node) != projections.end())
      first = &node;
  });
  auto sizes = std::make_shared<std::array<std::int64_t, 3>>();
  std::unordered_map<std::string, Value> parts;
  Node split;
  split.name = packed.name + "_Split";
  split.op_type = "Split";
  split.since_version = 13;
  split.attributes.emplace("axis", std::int64_t{-1});
  for (std::size_t i = 0; i < 3; ++i) {
    const Value& product = projections[i]->outputs[0];
    (*sizes)[i] = projections[i]->required_integer("M");
    split.outputs.push_back(product);
    split.outputs[i].name = graph.unique_name(product.name + "_part");
    parts.emplace(product.name, split.outputs[i]);
  }
  packed.outputs[0].name = first->outputs[0].name;
  Value lengths{graph.unique_name(packed.outputs[0].name + "_sizes"), DataType::kInt64, Shape{3}};
  lengths.constant = sizes->data();
  lengths.owner = sizes;
  split.inputs = {packed.outputs[0], std::move(lengths)};
  graph.replace(parts);
  graph.insert_before(*first, std::move(packed));
  *first = std::move(split);
}

}  // namespace

void packed_qkv(Graph& graph, RepackedWeights& weights) {
  graph.each("FlowQKVAttention", kDomain, [&](Node& node) {
    Projections projections{};
    bool normalised = false;
    for (const AttentionInput input : {kQuery, kKey, kValue}) {
      if (node.input(input) == nullptr) return;
      const Node* norm = input == kValue ? nullptr : norm_of(graph, node.inputs[input].name);
      const Value& product = norm == nullptr ? node.inputs[input] : norm->inputs[0];
      normalised = normalised || norm != nullptr;
      projections[input] = graph.producer(product.name, "Q4NXMatMul", kDomain);
      if (projections[input] == nullptr) return;
    }
    if (std::string reason = obstacle_of(graph, weights, node, projections); !reason.empty())
      return graph.missed("packed_qkv", node, std::move(reason));
    std::int64_t rows = 0;
    for (const Node* projection : projections) rows += projection->required_integer("M");
    Value weight = weights.join({projections.begin(), projections.end()}, "qkv_proj.weight");
    Node packed = *projections[kValue];
    if (is_biased(&packed)) packed.inputs[kProductBias] = joined_bias(graph, projections);
    packed.inputs[kProductWeight] = std::move(weight);
    packed.attributes.insert_or_assign("M", rows);
    if (packed.outputs[0].shape) (*packed.outputs[0].shape)[-1] = rows;
    if (normalised) {
      split_product(graph, projections, std::move(packed));
    } else {
      // In the value projection's place, which comes after X, as all three projections do.
      node.inputs[kQuery] = packed.outputs[0];
      node.inputs[kKey] = node.inputs[kValue] = Value{};
      *projections[kValue] = std::move(packed);
    }
    graph.applied("packed_qkv");
    graph.changed();
  });
}

}  // namespace flownpu::lowering
