// SPDX-License-Identifier: Apache-2.0
// Operators that the array computes by themselves, outside of a decoder or an encoder that is known
// whole (aie/programs/operators.py): of which sizes a node is, by which its programs are found, and
// the constants that these read.
#pragma once

#include <cstdint>
#include <vector>

#include "ops/device.h"
#include "ops/nodes/node.h"

namespace flownpu::npu {

// Whether it is a node that programs are looked for, or, `on_array`, that has been given to them:
// the node of the graph, in the array's domain, with the constants of its programs packed.
bool is_operator(const Node& node);
bool is_operator_on_array(const Node& node);

// What programs are found by. `sizes`: nodes with the operator's stem for their op_type and these
// attributes:
//
//   q4nx_matmul, fused_dqp, dense_matmul       inner (K), columns (N: of Q4NX whole rows of blocks,
//                                              with gating the gate's and the up projection's)
//                                              (Q4NXMoE: q4nx_matmul of an expert's gate and up
//                                              projections, and of its down projection)
//   flow_qkv_attention, flow_kv_attention      num_heads, kv_num_heads, head_size,
//                                              local_window_size (0: none), causal
//
// One for each kind of programs that runs may need; attention with a mask may need both kinds.
struct ArrayOperator {
  std::vector<Node> sizes;
  // Work of one row of a product; for attention, of one query and one key in all heads; of experts
  // what one row of X is, on average, to one of them in its larger product.
  std::int64_t multiply_adds = 0;
  // Rows of all runs, if the graph says how many; else 0. For attention, queries times keys.
  std::int64_t rows = 0;
};

// Describes a node of the graph, or one that is on the array. Throws Error, by name, for what the
// array's designs have no place for.
ArrayOperator describe_operator(const Node& node);

// The node for the array, of one that describe_operator takes.
Node operator_on_array(Node node);
// The node of the graph again.
Node operator_of_graph(Node node);

// The products of a mixture of experts: an expert's gated one, and the one with its down
// projection.
enum class ExpertPart : std::uint8_t { kGateUp, kDown };
// That product as a node Q4NXMatMul: of a Q4NXMoE of the graph, or of one on the array, which has
// its constants packed. Throws Error if the weight's shape is not known, or is none of experts.
Node expert_product(const Node& mixture, ExpertPart part, std::int64_t expert);

// Multiply-adds that a dispatch must be worth, where the option `npu_threshold` does not say:
// what the host computes meanwhile. `threads`: of the host.
std::int64_t default_threshold(Activations activations, int threads);

}  // namespace flownpu::npu
