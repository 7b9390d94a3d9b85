// SPDX-License-Identifier: Apache-2.0
#include "ops/lowering/lowering.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <iomanip>
#include <sstream>
#include <string_view>
#include <utility>

namespace flownpu::lowering {
namespace {

struct Rule {
  std::string_view op_type;
  std::string (*obstacle)(const Node& node);
};

constexpr std::array<Rule, 4> kRules{{
    {"FastGelu", fast_gelu_obstacle},
    {"MatMulNBits", q4nx_matmul_obstacle},
    {"GatherBlockQuantized", q4nx_gather_obstacle},
    {"GroupQueryAttention", flow_qkv_attention_obstacle},
}};

const Rule* rule_of(const Node& node) {
  if (node.domain != "com.microsoft") return nullptr;
  const auto* rule = std::ranges::find(kRules, node.op_type, &Rule::op_type);
  return rule == kRules.end() ? nullptr : rule;
}

}  // namespace

bool is_lowered(const Node& node) { return rule_of(node) != nullptr; }

std::string obstacle(const Node& node) {
  const Rule* rule = rule_of(node);
  return rule == nullptr ? "" : rule->obstacle(node);
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
