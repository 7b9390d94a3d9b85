// SPDX-License-Identifier: Apache-2.0
// Operators by themselves: a step's inputs go to the device, its kernels run, its outputs come
// back. Constants that are large, weights, stay on the device. Shapes, lengths and what is refused
// of them are the host's step's, the CPU device's.
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

// What a step is made with.
struct Making {
  std::shared_ptr<Context> context;
  // The same node's, on the CPU.
  std::unique_ptr<Step> host;
  Activations activations = Activations::kInt8;
  GpuWeights weights = GpuWeights::kAuto;
  // The host's kernels and threads.
  cpu::Context host_context;
};

class HostCheckedStep : public Step {
 public:
  explicit HostCheckedStep(Making making)
      : context_(std::move(making.context)), host_(std::move(making.host)) {}

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

// Each throws Error for a node of its operator that the device's kernels do not compute.
std::unique_ptr<Step> make_product(const Node& node, Making making);
std::unique_ptr<Step> make_dense_product(const Node& node, Making making);
std::unique_ptr<Step> make_gather(const Node& node, Making making);
std::unique_ptr<Step> make_rms_norm(const Node& node, Making making);
std::unique_ptr<Step> make_rotary_embedding(const Node& node, Making making);
std::unique_ptr<Step> make_argmax(const Node& node, Making making);
std::unique_ptr<Step> make_attention(const Node& node, Making making);

// What of an attention node the kernel has no place for; empty if it has.
std::string refused_attention(const Node& node);

// The operators that there are, by their names.
struct Operator {
  std::string_view op_type;
  std::unique_ptr<Step> (*make)(const Node& node, Making making);
};
std::span<const Operator> operators();
// Null if the device has none of this name.
const Operator* find_operator(std::string_view op_type);

}  // namespace flownpu::gpu
