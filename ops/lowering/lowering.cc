// SPDX-License-Identifier: Apache-2.0
#include "ops/lowering/lowering.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <iomanip>
#include <sstream>
#include <string_view>
#include <utility>

#include "ops/error.h"

namespace flownpu::lowering {
namespace {

struct Rule {
  const Contract* contract;
  std::string (*obstacle)(const Node& node);
  void (*apply)(Graph& graph, RepackedWeights& weights);
};

constexpr std::array<Rule, 4> kRules{{
    {&kFastGelu, [](const Node& /*node*/) { return std::string(); },
     [](Graph& graph, RepackedWeights& /*weights*/) { fast_gelu(graph); }},
    {&kMatMulNBits, q4nx_matmul_obstacle, q4nx_matmul},
    {&kGatherBlockQuantized, q4nx_gather_obstacle, q4nx_gather},
    {&kGroupQueryAttention, flow_qkv_attention_obstacle,
     [](Graph& graph, RepackedWeights& /*weights*/) { flow_qkv_attention(graph); }},
}};

const Rule* rule_of(const Node& node) {
  const auto* rule = std::ranges::find_if(kRules, [&](const Rule& candidate) {
    return candidate.contract->op_type == node.op_type && candidate.contract->domain == node.domain;
  });
  return rule == kRules.end() ? nullptr : rule;
}

}  // namespace

bool is_lowered(const Node& node) { return rule_of(node) != nullptr; }

std::vector<const Contract*> contracts() {
  std::vector<const Contract*> all;
  all.reserve(kRules.size());
  for (const Rule& rule : kRules) all.push_back(rule.contract);
  return all;
}

Node lowered_alone(const Node& node, const Producer& producer) {
  const Rule& rule = *rule_of(node);
  for (const std::string& reason : {violation(*rule.contract, node), rule.obstacle(node)})
    if (!reason.empty()) throw Error(reason);
  // With those that make constants of constants, which a rule may look through.
  std::vector<Node> nodes;
  for (const Value& input : node.inputs) {
    const Node* maker = input.name.empty() || !producer ? nullptr : producer(input.name);
    const auto is_constant = [](const Value& v) { return v.name.empty() || v.constant != nullptr; };
    if (maker != nullptr && std::ranges::all_of(maker->inputs, is_constant))
      nodes.push_back(*maker);
  }
  nodes.push_back(node);
  std::vector<std::string> outputs;
  outputs.reserve(node.outputs.size());
  for (const Value& output : node.outputs) outputs.push_back(output.name);
  Graph graph(std::move(nodes), outputs);
  RepackedWeights weights;
  rule.apply(graph, weights);
  Node lowered = graph.take().back();
  if (is_lowered(lowered))
    fail("[", to_string(node), "] expected its weight to be a constant, or one that is reshaped");
  return lowered;
}

Lowered lower(std::vector<Node> nodes, const std::vector<std::string>& outputs) {
  const auto begin = std::chrono::steady_clock::now();
  Graph graph(std::move(nodes), outputs);
  RepackedWeights weights;
  q4nx_matmul(graph, weights);
  q4nx_gather(graph, weights);
  flow_qkv_attention(graph);
  qk_norm(graph);
  split_qkv(graph);
  packed_qkv(graph, weights);
  gated_projection(graph, weights);
  fast_gelu(graph);
  dense_matmul(graph);
  unread_present(graph);
  Lowered lowered{.nodes = graph.take(), .on_host = {}, .summary = ""};
  weights.make(lowered.nodes);
  if (weights.made() > 0) {
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
    std::ostringstream text;
    text << weights.made() << " weights were repacked to Q4NX in " << std::fixed
         << std::setprecision(1) << seconds.count() << " s (`flownpu compile` keeps them)";
    if (weights.quantized_again() > 0) {
      text << "; " << weights.quantized_again()
           << " of them are in blocks of 16, Q4NX's groups are 32: they were quantised again, "
              "with a relative error of up to "
           << std::setprecision(3) << weights.largest_error();
    }
    lowered.summary = text.str();
  }
  return lowered;
}

}  // namespace flownpu::lowering
