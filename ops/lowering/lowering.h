// SPDX-License-Identifier: Apache-2.0
// Lowering of exported graphs: operators that hold weights or attend become those of `ai.flownpu`,
// and the nodes around them are drawn in. What graph_rewrites/ does
// to a file this does when a session is built, so that a model runs as it was exported.
//
// One rule a file, with the stem of its rule in graph_rewrites/ where there is one:
//
//   q4nx_matmul         MatMulNBits -> Q4NXMatMul
//   q4nx_gather         GatherBlockQuantized -> Q4NXGather
//   flow_qkv_attention  GroupQueryAttention -> FlowQKVAttention
//   split_qkv           Split before the attention -> packed query, key and value
//   qk_norm             norms of query and key -> inside the attention
//   packed_qkv          three projections of the attention -> one
//   gated_projection    gate and up projection with their activation -> one
//   dense_matmul        MatMul and Gemm with a constant weight, and what follows them ->
//   DenseMatMul unread_present      presents of an encoder's attention that nobody reads -> none
//   fast_gelu           FastGelu -> Gelu with the tanh approximation, where no projection took it
#pragma once

#include <string>
#include <vector>

#include "ops/contract.h"
#include "ops/device.h"
#include "ops/lowering/graph.h"
#include "ops/lowering/quantized_weight.h"
#include "ops/node.h"

namespace flownpu::lowering {

// Whether a rule is for the node's operator.
bool is_lowered(const Node& node);
// What becomes of such a node by itself; its constants have no bytes yet. Throws Error with the
// reason if the rule does not take it. `producer`: as Device::unsupported has it.
Node lowered_alone(const Node& node, const Producer& producer);
// What rules take of operators.
std::vector<const Contract*> contracts();

// The nodes after all rules. Nodes that no rule takes stay as they are.
Lowered lower(std::vector<Node> nodes, const std::vector<std::string>& outputs);

// --- The rules --------------------------------------------------------------------------------

// Of those that take one operator: what they take of it, and what a contract cannot say of why they
// do not take a node, empty if they do.

extern const Contract kMatMulNBits;
std::string q4nx_matmul_obstacle(const Node& node);
void q4nx_matmul(Graph& graph, RepackedWeights& weights);
extern const Contract kGatherBlockQuantized;
std::string q4nx_gather_obstacle(const Node& node);
void q4nx_gather(Graph& graph, RepackedWeights& weights);
extern const Contract kGroupQueryAttention;
std::string flow_qkv_attention_obstacle(const Node& node);
void flow_qkv_attention(Graph& graph);
void split_qkv(Graph& graph);
void qk_norm(Graph& graph);
void packed_qkv(Graph& graph, RepackedWeights& weights);
void gated_projection(Graph& graph, RepackedWeights& weights);
void dense_matmul(Graph& graph);
void unread_present(Graph& graph);
extern const Contract kFastGelu;
void fast_gelu(Graph& graph);

}  // namespace flownpu::lowering
