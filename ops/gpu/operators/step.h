// SPDX-License-Identifier: Apache-2.0
// Operators: a step runs kernels on its inputs' and outputs' twins (twins.h); what has none, such
// as a graph's inputs and outputs, is copied. Weights stay on the device. Shapes and lengths are
// inferred and checked by the CPU device's step for the same node, the host's.
#pragma once

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "ops/cpu/step.h"
#include "ops/device.h"
#include "ops/gpu/context/context.h"
#include "ops/gpu/language/kernel.h"
#include "ops/gpu/operators/run.h"

namespace flownpu::gpu {

// The arguments of a step's constructor, beside its node.
struct StepArguments {
  std::shared_ptr<Context> context;
  // The CPU device's step for the same node.
  std::unique_ptr<Step> host;
  Activations activations = Activations::kInt8;
  GpuWeights weights = GpuWeights::kAuto;
  GpuMatrices matrices = GpuMatrices::kAuto;
  GpuWinograd winograd = GpuWinograd::kAuto;
  // The host's kernels and threads.
  cpu::Context host_context;
  // Whether the host computes attention of single tokens over a cache, which it holds: copying
  // what is read once takes longer than reading it.
  bool tokens_on_host = false;
};

// A step that lets the host's step infer shapes and refuse inputs.
class HostCheckedStep : public Step {
 public:
  // Copies constants of floats and int8 to the device.
  HostCheckedStep(const Node& node, StepArguments arguments);

  void infer(std::span<const Tensor> inputs, std::span<Shape> outputs) const override {
    host_->infer(inputs, outputs);
  }
  std::int64_t multiply_adds() const override { return host_->multiply_adds(); }

 protected:
  // A kernel, compiled for numbers that its text contains.
  struct Prepared {
    std::vector<std::int64_t> numbers;
    std::shared_ptr<const CompiledKernel> kernel;
    std::int64_t lanes;
  };

  Context& context() const { return *context_; }
  const std::string& name() const { return name_; }
  // The buffer of an input that is given.
  const Buffer* at(Run& run, std::span<const Tensor> inputs, std::size_t index) const;
  // The kernel that `make` describes, compiled when its numbers first occur. Needs a Run.
  const Prepared& prepared(std::vector<std::int64_t> numbers,
                           const std::function<KernelDescription()>& make) const;

 private:
  std::shared_ptr<Context> context_;
  std::unique_ptr<Step> host_;
  std::string name_;
  std::map<std::size_t, Buffer> constants_;  // by their indices among the inputs
  mutable std::deque<Prepared> kernels_;     // under the context's mutex
};

// Each throws Error for a node that the device's kernels do not compute.
std::unique_ptr<Step> make_product(const Node& node, StepArguments arguments);
std::unique_ptr<Step> make_dense_product(const Node& node, StepArguments arguments);
std::unique_ptr<Step> make_activations_product(const Node& node, StepArguments arguments);
std::unique_ptr<Step> make_convolution(const Node& node, StepArguments arguments);
std::unique_ptr<Step> make_gather(const Node& node, StepArguments arguments);
std::unique_ptr<Step> make_experts(const Node& node, StepArguments arguments);
std::unique_ptr<Step> make_attention(const Node& node, StepArguments arguments);
std::unique_ptr<Step> make_whole_attention(const Node& node, StepArguments arguments);
std::unique_ptr<Step> make_rms_norm(const Node& node, StepArguments arguments);
std::unique_ptr<Step> make_group_norm(const Node& node, StepArguments arguments);
std::unique_ptr<Step> make_softmax(const Node& node, StepArguments arguments);
std::unique_ptr<Step> make_rotary_embedding(const Node& node, StepArguments arguments);
std::unique_ptr<Step> make_causal_convolution(const Node& node, StepArguments arguments);
std::unique_ptr<Step> make_linear_attention(const Node& node, StepArguments arguments);
std::unique_ptr<Step> make_gated_norm(const Node& node, StepArguments arguments);
std::unique_ptr<Step> make_argmax(const Node& node, StepArguments arguments);
std::unique_ptr<Step> make_elementwise(const Node& node, StepArguments arguments);
std::unique_ptr<Step> make_move(const Node& node, StepArguments arguments);

// An operator that the device computes, and how its steps are made.
struct Operator {
  std::string_view domain;
  std::string_view op_type;
  std::unique_ptr<Step> (*make)(const Node& node, StepArguments arguments);
  // Why the kernels do not compute a node; empty if they do.
  std::string (*refused)(const Node& node);
  // Whether the device is worth a copy of the inputs. Other nodes run where their inputs are.
  bool is_heavy = false;
};
std::span<const Operator> operators();
// Null if the device has none of this name.
const Operator* find_operator(std::string_view domain, std::string_view op_type);

// Reasons for Operator::refused.
std::string refused_attention(const Node& node);
std::string refused_whole_attention(const Node& node);
std::string refused_convolution(const Node& node);
std::string refused_softmax(const Node& node);
std::string refused_causal_convolution(const Node& node);
std::string refused_linear_attention(const Node& node);
std::string refused_gated_norm(const Node& node);
std::string refused_argmax(const Node& node);
std::string refused_move(const Node& node);
// That an input or output is not of floats.
std::string refused_floats(const Node& node);

}  // namespace flownpu::gpu
