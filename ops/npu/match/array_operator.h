// SPDX-License-Identifier: Apache-2.0
// Operators that the array computes one by one, outside of a whole decoder or encoder
// (aie/programs/operators.py): the sizes of a node, by which its programs are found, and the
// constants that these programs read.
#pragma once

#include <cstdint>
#include <vector>

#include "ops/device.h"
#include "ops/nodes/node.h"

namespace flownpu::npu {

// is_operator: whether the node is one of the graph for which programs are looked for.
// is_operator_on_array: whether the array computes the node, which then is in the array's domain
// and has packed constants.
bool is_operator(const Node& node);
bool is_operator_on_array(const Node& node);

// The description by which programs are found. `sizes` are nodes whose op_type is the operator's
// stem and which have these attributes:
//
//   q4nx_matmul, fused_dqp, dense_matmul       inner (K), columns (N; for Q4NX rounded up to whole
//                                              rows of blocks, and with gating those of gate and up
//                                              projection together); for Q4NX, eight_bits (0: codes
//                                              of 4). A Q4NXMoE has two nodes
//                                              q4nx_matmul: an expert's gate and up projections,
//                                              and its down projection
//   convolution                                the fields of ConvolutionSizes (convolution.h);
//                                              a row is an output pixel
//   flow_qkv_attention, flow_kv_attention      num_heads, kv_num_heads, head_size,
//                                              local_window_size (0: none), causal, sinks
//
// There is one for each kind of programs that runs may need; attention with a mask may need two.
struct ArrayOperator {
  std::vector<Node> sizes;
  // Multiply-adds of one row of a product; for attention, those of one query and one key in all
  // heads; for a mixture, those of its larger product times experts_per_token / num_experts.
  std::int64_t multiply_adds = 0;
  // Rows that every run has, if the graph says how many, else 0. For attention, queries times keys.
  std::int64_t rows = 0;
};

// Describes a node of the graph, or one that is on the array. Throws Error, which names the node,
// if the array's designs do not support it.
ArrayOperator describe_operator(const Node& node);

// The node for the array, made of one of the graph that describe_operator() accepts.
Node operator_on_array(Node node);
// The node as it was in the graph.
Node operator_of_graph(Node node);

// The two products of an expert: with its gate and up projections, and with its down projection.
enum class ExpertPart : std::uint8_t { kGateUp, kDown };
// An expert's product as a node Q4NXMatMul. `mixture`: a Q4NXMoE of the graph, or one on the array,
// which has the constants packed. Throws Error if the weight's shape is not known, or does not fit
// the experts.
Node expert_product(const Node& mixture, ExpertPart part, std::int64_t expert);

// The multiply-adds that pay for a dispatch.
struct Threshold {
  std::int64_t rows = 0;
  // For a product of one row with a Q4NX weight, in a graph without layers for other arrays: all
  // such products share one array, so that tokens change no array.
  std::int64_t one_row = 0;
};
// Those if the option `npu_threshold` is not set: what the host computes in the time of a dispatch.
// `threads`: the host's.
Threshold default_threshold(Activations activations, int threads);
// The attribute of a product on the array with its Threshold::one_row, where that counts.
inline constexpr const char* kLeastOfOneRow = "least_of_one_row";

}  // namespace flownpu::npu
