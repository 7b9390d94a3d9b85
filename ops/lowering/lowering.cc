// SPDX-License-Identifier: Apache-2.0
#include "ops/lowering/lowering.h"

#include <algorithm>
#include <chrono>
#include <iomanip>
#include <iterator>
#include <sstream>
#include <string_view>
#include <utility>

#include "ops/error.h"
#include "ops/nodes/q4nx_matmul.h"

namespace flownpu::lowering {
namespace {

enum class For : std::uint8_t { kAll, kSession, kConversion };

struct Rule {
  std::string_view name;
  void (*apply)(Graph& graph, RepackedWeights& weights);
  For whom = For::kAll;
  // For rules of one operator only: its contract, and a function that returns the reason for
  // refusing a node if a contract cannot express it.
  const Contract* contract = nullptr;
  std::string (*more)(const Node& node) = nullptr;
};

template <void (*RULE)(Graph&)>
void of_graph(Graph& graph, RepackedWeights& /*weights*/) {
  RULE(graph);
}

// In the order of application: each rule reads the results of earlier ones.
constexpr Rule kRules[] = {
    {"q4nx_matmul", q4nx_matmul, For::kAll, &kMatMulNBits, q4nx_matmul_obstacle},
    {"q4nx_matmul", q4nx_matmul_bnb4, For::kAll, &kMatMulBnb4, q4nx_matmul_bnb4_obstacle},
    {"q4nx_dequantized", q4nx_dequantized},
    {"q4nx_dequantized", q4nx_dequantized_rows, For::kConversion},
    {"projection_bias", of_graph<projection_bias>},
    {"q4nx_gather", q4nx_gather, For::kAll, &kGatherBlockQuantized, q4nx_gather_obstacle},
    {"q4nx_moe", q4nx_moe, For::kAll, &kQMoE, q4nx_moe_obstacle},
    {"flow_qkv_attention", of_graph<flow_qkv_attention>, For::kAll, &kGroupQueryAttention,
     flow_qkv_attention_obstacle},
    {"qk_norm", of_graph<qk_norm>},
    {"split_qkv", of_graph<split_qkv>},
    {"packed_qkv", packed_qkv},
    {"gated_projection", gated_projection},
    {"gelu", of_graph<gelu>, For::kSession},
    {"swish", of_graph<swish>, For::kSession},
    {"group_norm", of_graph<group_norm>, For::kSession},
    {"convolution", of_graph<convolution>, For::kSession},
    {"standard_attention", of_graph<standard_attention>, For::kSession},
    {"attention_by_token", of_graph<attention_by_token>, For::kSession},
    {"dynamic_product", of_graph<dynamic_product>, For::kSession},
    {"dense_matmul", of_graph<dense_matmul>, For::kSession},
    {"dequantized", of_graph<dequantized>, For::kSession},
    {"unread_present", of_graph<unread_present>, For::kSession},
};

void apply_for_session(Graph& graph, RepackedWeights& weights) {
  for (const Rule& rule : kRules)
    if (rule.whom != For::kConversion) rule.apply(graph, weights);
}

const Rule* rule_of(const Node& node) {
  const auto* rule = std::ranges::find_if(kRules, [&](const Rule& candidate) {
    return candidate.contract != nullptr && candidate.contract->op_type == node.op_type &&
           candidate.contract->domain == node.domain;
  });
  return rule == std::end(kRules) ? nullptr : rule;
}

}  // namespace

std::string obstacle(const Contract& contract, std::string (*more)(const Node& node),
                     const Node& node) {
  std::string reason = misfit(contract, node);
  return reason.empty() ? more(node) : reason;
}

std::string epilogue_of(const Node& projection, bool biased) {
  const bool free = (biased || projection.input(kProductBias) == nullptr) &&
                    projection.input(kProductResidual) == nullptr &&
                    projection.text("gating", "none") == "none";
  return free ? "" : projection.name + " has an epilogue (bias, residual or gating)";
}

bool is_lowered(const Node& node) { return rule_of(node) != nullptr; }

std::vector<const Contract*> contracts() {
  std::vector<const Contract*> all;
  for (const Rule& rule : kRules)
    if (rule.contract != nullptr) all.push_back(rule.contract);
  return all;
}

Node lowered_alone(const Node& node, const Producer& producer, ContractCheck check) {
  const Rule& rule = *rule_of(node);
  for (const std::string& reason : {check(*rule.contract, node), rule.more(node)})
    if (!reason.empty()) throw Error(reason);
  // Includes the producers behind which a rule may look: Reshapes, and nodes that read constants
  // only.
  std::vector<Node> nodes;
  for (const Value& input : node.inputs) {
    const Node* maker = input.name.empty() || !producer ? nullptr : producer(input.name);
    const auto is_constant = [](const Value& v) { return v.name.empty() || v.constant != nullptr; };
    if (maker == nullptr) continue;
    const bool reshapes = maker->op_type == "Reshape" && maker->domain.empty();
    if (reshapes || std::ranges::all_of(maker->inputs, is_constant)) nodes.push_back(*maker);
  }
  nodes.push_back(node);
  std::vector<std::string> outputs;
  outputs.reserve(node.outputs.size());
  for (const Value& output : node.outputs) outputs.push_back(output.name);
  Graph graph(std::move(nodes), outputs);
  RepackedWeights weights(graph);
  rule.apply(graph, weights);
  Node lowered = graph.take().back();
  if (is_lowered(lowered))
    fail("[", to_string(node), "] expected its weight to be a constant, or one that is reshaped");
  return lowered;
}

std::vector<Node> outline(std::vector<Node> nodes, const std::vector<std::string>& outputs,
                          const Promised& promised) {
  Graph graph(std::move(nodes), outputs);
  RepackedWeights weights(graph);
  for (const auto& [name, constant] : promised) weights.take(name, *constant);
  apply_for_session(graph, weights);
  return graph.take();
}

Lowered lower(std::vector<Node> nodes, const std::vector<std::string>& outputs) {
  const auto begin = std::chrono::steady_clock::now();
  Graph graph(std::move(nodes), outputs);
  RepackedWeights weights(graph);
  apply_for_session(graph, weights);
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

std::vector<Contract> of_rules(std::span<const Contract> all) {
  constexpr std::pair<std::string_view, std::string_view> kDrawn[] = {
      {kDomain, "FlowQKVAttention"},
      {kDomain, "Q4NXMatMul"},
      {"", "SimplifiedLayerNormalization"},
      {"", "DequantizeLinear"},
      {"", "MatMul"},
      {"", "Gemm"},
      {"", "Gather"},
      {"", "Transpose"},
      {"", "Reshape"},
      {"", "Split"},
      {"", "Mul"},
      {"", "Add"},
      {"", "Div"},
      {"", "Pow"},
      {"", "Erf"},
      {"", "Tanh"},
      {"", "Sigmoid"},
      {"", "Gelu"},
      {"com.microsoft", "FastGelu"}};
  std::vector<Contract> drawn;
  for (const Contract* contract : contracts()) drawn.push_back(*contract);
  for (const Contract& contract : all) {
    if (std::ranges::find(kDrawn, std::pair(contract.domain, contract.op_type)) != std::end(kDrawn))
      drawn.push_back(contract);
  }
  return drawn;
}

std::vector<std::string> conversion_rules() {
  std::vector<std::string> names;
  for (const Rule& rule : kRules)
    if (rule.whom != For::kSession) names.emplace_back(rule.name);
  return names;
}

void rewrite(Graph& graph, RepackedWeights& weights, std::span<const std::string> rules) {
  for (const std::string& name : rules) {
    if (std::ranges::find(kRules, name, &Rule::name) != std::end(kRules)) continue;
    std::string known;
    for (const Rule& rule : kRules) known.append(known.empty() ? "" : ", ").append(rule.name);
    fail("expected rules of ", known, ", got ", name);
  }
  for (const Rule& rule : kRules) {
    if (std::ranges::find(rules, rule.name) != rules.end()) rule.apply(graph, weights);
  }
}

}  // namespace flownpu::lowering
