// SPDX-License-Identifier: Apache-2.0
// Rewrites exported graphs: operators with weights, and attention, become operators of
// `ai.flownpu`, into which nodes around them are fused. This happens when a session is built, so
// that exported models run without conversion, and, through flownpu._native, when a file is
// converted.
//
// There is one rule in each file:
//
//   q4nx_matmul         MatMulNBits -> Q4NXMatMul
//   projection_bias     Add of a constant behind a projection -> inside it
//   q4nx_gather         GatherBlockQuantized -> Q4NXGather
//   q4nx_moe            QMoE -> Q4NXMoE
//   q4nx_dequantized    DequantizeLinear of 4, 8 bits before MatMul, Gemm, Gather -> Q4NXMatMul,
//                       Q4NXGather
//   flow_qkv_attention  GroupQueryAttention -> FlowQKVAttention
//   qk_norm             norms of query and key -> inside the attention
//   split_qkv           Split before the attention -> packed query, key and value
//   packed_qkv          three projections of the attention, or of its norms -> one
//   gated_projection    gate and up projection with their activation -> one
// and, in a session only,
//   gelu                GELU in simple operators, by Erf or Tanh -> Gelu
//   swish               Mul of x and its Sigmoid -> Swish, QuickGelu
//   group_norm          InstanceNormalization between Reshapes -> GroupNorm; Swish -> inside it
//   convolution         Relu behind a Conv, a sum before it, a Resize that doubles its images ->
//                       FusedConv
//   standard_attention  MatMul, Softmax, MatMul of activations -> Attention
//   attention_by_token  Transposes around an Attention -> Reshapes
//   dynamic_product     DynamicQuantizeLinear, MatMulInteger and Mul -> DenseMatMul
//   dense_matmul        MatMul and Gemm with a constant weight, and what follows -> DenseMatMul
//   dequantized         DequantizeLinear of constants -> constants, or behind the Gather
//   unread_present      presents of an encoder's attention that nobody reads -> absent
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

// Whether some rule replaces nodes of this node's operator one by one.
bool is_lowered(const Node& node);
// The nodes that replace such a node by itself. The constants of the result have no bytes yet.
// Throws Error with the reason if the rule does not take the node. `producer`: as in
// Device::unsupported; `check`: violation() or violation_in_file().
Node lowered_alone(const Node& node, const Producer& producer, ContractCheck check);
// The contracts of the operators that rules replace.
std::vector<const Contract*> contracts();

// Applies all rules, and repacks the weights of the result. Nodes that no rule takes stay as they
// are.
Lowered lower(std::vector<Node> nodes, const std::vector<std::string>& outputs);
// Constants whose bytes are still to be made, by their names in the graph.
using Promised = std::map<std::string, const Q4NXConstant*>;
// Like lower(), but constants get no bytes. For callers that only need the resulting graph.
std::vector<Node> outline(std::vector<Node> nodes, const std::vector<std::string>& outputs,
                          const Promised& promised);

// The rules' own contracts, and those contracts in `all` whose operators rules fuse. A rule must
// know every input, output and attribute of such a node.
std::vector<Contract> of_rules(std::span<const Contract> all);
// The names of the rules that apply when a file is converted, in their order.
std::vector<std::string> conversion_rules();
// Applies the rules with these names, in the order of the list above. Throws Error, which lists all
// rules, for an unknown name.
void rewrite(Graph& graph, RepackedWeights& weights, std::span<const std::string> rules);

// --- The rules --------------------------------------------------------------------------------

// The reason why the node does not fit the contract, else the result of `more`; empty if the node
// is taken.
std::string obstacle(const Contract& contract, std::string (*more)(const Node& node),
                     const Node& node);
// The reason why the epilogue of a Q4NXMatMul (bias, residual or gating) prevents a join with
// another product; empty if it does not. `biased`: whether a bias is allowed.
std::string epilogue_of(const Node& projection, bool biased);

// A rule of one operator has a contract, and a function that returns the reason for refusing a node
// if a contract cannot express it; else the function returns an empty text.

extern const Contract kMatMulNBits;
std::string q4nx_matmul_obstacle(const Node& node);
void q4nx_matmul(Graph& graph, RepackedWeights& weights);
extern const Contract kMatMulBnb4;
std::string q4nx_matmul_bnb4_obstacle(const Node& node);
void q4nx_matmul_bnb4(Graph& graph, RepackedWeights& weights);
void q4nx_dequantized(Graph& graph, RepackedWeights& weights);
void q4nx_dequantized_rows(Graph& graph, RepackedWeights& weights);
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
void gelu(Graph& graph);
void swish(Graph& graph);
void group_norm(Graph& graph);
void convolution(Graph& graph);
void standard_attention(Graph& graph);
void attention_by_token(Graph& graph);
// A constant scale, or one for all, as a vector of `columns`; without a name if it is neither.
Value columns_of(Graph& graph, const Value& scale, std::int64_t columns);
// Whether zero points are absent, or constants that are 0.
bool is_zero(const Value* zeros);
void dynamic_product(Graph& graph);
void dense_matmul(Graph& graph);
void dequantized(Graph& graph);
void unread_present(Graph& graph);

}  // namespace flownpu::lowering
