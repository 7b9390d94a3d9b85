// SPDX-License-Identifier: Apache-2.0
// The context of all steps of the CPU device (kernels of an instruction set, threads), and the list
// of operators.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string_view>

#include "ops/cpu/kernels.h"
#include "ops/cpu/thread_pool.h"
#include "ops/device.h"
#include "ops/nodes/contract.h"

namespace flownpu::cpu {

struct Context {
  const Kernels& kernels;
  std::shared_ptr<ThreadPool> pool;
  Activations activations;
};

// Throws Error if options.cpu_isa names no available instruction set.
Context make_context(const DeviceOptions& options);

// Makes the step of one node; throws Error with the reason if this device does not take it.
using MakeStep = std::unique_ptr<Step> (*)(const Node& node, const Context& context);

// The MakeStep of a class whose constructor takes the node and the context.
template <typename StepClass>
std::unique_ptr<Step> make(const Node& node, const Context& context) {
  return std::make_unique<StepClass>(node, context);
}

// An operator on this device: the nodes that it takes, and the function that makes a step for one.
// `make` may refuse further nodes, with the reason.
struct Operator {
  Contract contract;
  MakeStep make;
};

// One list for each source file that has operators.
std::span<const Operator> q4nx_operators();
std::span<const Operator> q4nx_moe_operators();
std::span<const Operator> flow_qkv_attention_operators();
std::span<const Operator> flow_kv_attention_operators();
std::span<const Operator> paged_attention_operators();
std::span<const Operator> normalization_operators();
std::span<const Operator> function_operators();
std::span<const Operator> arithmetic_operators();
std::span<const Operator> comparison_operators();
std::span<const Operator> cast_operators();
std::span<const Operator> where_operators();
std::span<const Operator> range_operators();
std::span<const Operator> reduce_operators();
std::span<const Operator> pool_operators();
std::span<const Operator> group_norm_operators();
std::span<const Operator> embed_layer_norm_operators();
std::span<const Operator> cumulative_operators();
std::span<const Operator> top_k_operators();
std::span<const Operator> shape_operators();
std::span<const Operator> reshape_operators();
std::span<const Operator> part_operators();
std::span<const Operator> choice_operators();
std::span<const Operator> scatter_operators();
std::span<const Operator> pad_operators();
std::span<const Operator> resize_operators();
std::span<const Operator> dense_operators();
std::span<const Operator> gemm_operators();
std::span<const Operator> matmul_integer_operators();
std::span<const Operator> convolution_operators();
std::span<const Operator> quantization_operators();
std::span<const Operator> transpose_operators();
std::span<const Operator> standard_attention_operators();
std::span<const Operator> rotary_embedding_operators();
std::span<const Operator> multi_axis_rotary_embedding_operators();
std::span<const Operator> causal_convolution_operators();
std::span<const Operator> linear_attention_operators();
std::span<const Operator> gate_operators();

// Hands out 64-byte aligned parts of a step's scratch. Without memory it only counts.
class Scratch {
 public:
  explicit Scratch(std::byte* memory = nullptr) : memory_(memory) {}

  template <typename T>
  T* take(std::int64_t count) {
    std::byte* part = memory_ == nullptr ? nullptr : memory_ + used_;
    used_ += (static_cast<std::size_t>(count) * sizeof(T) + 63) / 64 * 64;
    return reinterpret_cast<T*>(part);
  }
  std::size_t bytes() const { return used_; }

 private:
  std::byte* memory_;
  std::size_t used_ = 0;
};

}  // namespace flownpu::cpu
