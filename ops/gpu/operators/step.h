// SPDX-License-Identifier: Apache-2.0
// Operators by themselves: a step copies its inputs to the device, runs kernels, and copies the
// outputs back. Weights stay on the device. Shapes and lengths are inferred and checked by the CPU
// device's step for the same node, the host's.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "ops/cpu/step.h"
#include "ops/device.h"
#include "ops/gpu/opencl/context.h"

namespace flownpu::gpu {

// The arguments of a step's constructor, beside its node.
struct StepArguments {
  std::shared_ptr<Context> context;
  // The CPU device's step for the same node.
  std::unique_ptr<Step> host;
  Activations activations = Activations::kInt8;
  GpuWeights weights = GpuWeights::kAuto;
  // The host's kernels and threads.
  cpu::Context host_context;
};

// A step that lets the host's step infer shapes and refuse inputs.
class HostCheckedStep : public Step {
 public:
  explicit HostCheckedStep(StepArguments arguments)
      : context_(std::move(arguments.context)), host_(std::move(arguments.host)) {}

  void infer(std::span<const Tensor> inputs, std::span<Shape> outputs) const override {
    host_->infer(inputs, outputs);
  }
  std::int64_t multiply_adds() const override { return host_->multiply_adds(); }

 protected:
  Context& context() const { return *context_; }

 private:
  std::shared_ptr<Context> context_;
  std::unique_ptr<Step> host_;
};

// Each throws Error for a node that the device's kernels do not compute.
std::unique_ptr<Step> make_product(const Node& node, StepArguments arguments);
std::unique_ptr<Step> make_dense_product(const Node& node, StepArguments arguments);
std::unique_ptr<Step> make_gather(const Node& node, StepArguments arguments);
std::unique_ptr<Step> make_rms_norm(const Node& node, StepArguments arguments);
std::unique_ptr<Step> make_rotary_embedding(const Node& node, StepArguments arguments);
std::unique_ptr<Step> make_argmax(const Node& node, StepArguments arguments);
std::unique_ptr<Step> make_attention(const Node& node, StepArguments arguments);

// Why the kernel does not compute an attention node; empty if it does.
std::string refused_attention(const Node& node);

// The operators that the device computes, and how their steps are made.
struct Operator {
  std::string_view op_type;
  std::unique_ptr<Step> (*make)(const Node& node, StepArguments arguments);
};
std::span<const Operator> operators();
// Null if the device has none of this name.
const Operator* find_operator(std::string_view op_type);

}  // namespace flownpu::gpu
