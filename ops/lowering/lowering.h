// SPDX-License-Identifier: Apache-2.0
// Rewriting of exported graphs: operators that hold weights or attend become those of `ai.flownpu`,
// and the nodes around them are drawn in. When a session is built, so that a model runs as it was
// exported; and, through flownpu._native, when a file is converted.
//
// One rule a file:
//
//   q4nx_matmul         MatMulNBits -> Q4NXMatMul
//   projection_bias     Add of a constant behind a projection -> inside it
//   q4nx_gather         GatherBlockQuantized -> Q4NXGather
//   q4nx_moe            QMoE -> Q4NXMoE
//   flow_qkv_attention  GroupQueryAttention -> FlowQKVAttention
//   qk_norm             norms of query and key -> inside the attention
//   split_qkv           Split before the attention -> packed query, key and value
//   packed_qkv          three projections of the attention -> one
//   gated_projection    gate and up projection with their activation -> one
// and, for a session alone,
//   fast_gelu           FastGelu -> Gelu with the tanh approximation, where no projection took it
//   dense_matmul        MatMul and Gemm with a constant weight, and what follows -> DenseMatMul
//   unread_present      presents of an encoder's attention that nobody reads -> none
#pragma once

#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "ops/device.h"
#include "ops/lowering/graph.h"
#include "ops/lowering/weights/quantized_weight.h"
#include "ops/lowering/weights/repacked_weights.h"
#include "ops/nodes/contract.h"
#include "ops/nodes/node.h"

namespace flownpu::lowering {

// Whether a rule is for the node's operator.
bool is_lowered(const Node& node);
// What becomes of such a node by itself; its constants have no bytes yet. Throws Error with the
// reason if the rule does not take it. `producer`: as Device::unsupported has it; `check`: what is
// asked of the node's contract.
Node lowered_alone(const Node& node, const Producer& producer, ContractCheck check);
// What rules take of operators.
std::vector<const Contract*> contracts();

// The nodes after all rules. Nodes that no rule takes stay as they are.
Lowered lower(std::vector<Node> nodes, const std::vector<std::string>& outputs);
// Constants that are to be made, by the names that nodes have for them.
using Promised = std::map<std::string, const Q4NXConstant*>;
// The same, but no constant has its bytes: for who asks what becomes of a graph, and runs nothing.
std::vector<Node> outline(std::vector<Node> nodes, const std::vector<std::string>& outputs,
                          const Promised& promised);

// Those of all contracts whose operators rules draw together: rules must know all that these have.
std::vector<Contract> of_rules(std::span<const Contract> all);
// Contracts of operators that plain graphs are written with, and that no device takes: for the
// rules of graph_rewrites/, which fold such graphs.
std::span<const Contract> plain_contracts();
// The rules that a file is converted with, in their order.
std::vector<std::string> conversion_rules();
// Applies some of the rules, by name, in their order. Throws Error, which lists them, if there is
// no such rule.
void rewrite(Graph& graph, RepackedWeights& weights, std::span<const std::string> rules);

// --- The rules --------------------------------------------------------------------------------

// Why a node is not within the contract, or what that cannot say; empty if it is taken.
std::string obstacle(const Contract& contract, std::string (*more)(const Node& node),
                     const Node& node);
// Why a Q4NXMatMul cannot be joined with another because of what it does behind its product; empty
// if it can. `biased`: whether it may have a bias.
std::string epilogue_of(const Node& projection, bool biased);

// A rule that takes one operator has a contract, and tells why it does not take a node beyond what
// the contract can say; empty if it does.

extern const Contract kMatMulNBits;
std::string q4nx_matmul_obstacle(const Node& node);
void q4nx_matmul(Graph& graph, RepackedWeights& weights);
void projection_bias(Graph& graph);
extern const Contract kGatherBlockQuantized;
std::string q4nx_gather_obstacle(const Node& node);
void q4nx_gather(Graph& graph, RepackedWeights& weights);
extern const Contract kQMoE;
std::string q4nx_moe_obstacle(const Node& node);
void q4nx_moe(Graph& graph, RepackedWeights& weights);
extern const Contract kGroupQueryAttention;
std::string flow_qkv_attention_obstacle(const Node& node);
void flow_qkv_attention(Graph& graph);
void qk_norm(Graph& graph);
void split_qkv(Graph& graph);
void packed_qkv(Graph& graph, RepackedWeights& weights);
void gated_projection(Graph& graph, RepackedWeights& weights);
extern const Contract kFastGelu;
void fast_gelu(Graph& graph);
void dense_matmul(Graph& graph);
void unread_present(Graph& graph);

}  // namespace flownpu::lowering
