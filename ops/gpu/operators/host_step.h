// SPDX-License-Identifier: Apache-2.0
// HostStep: a step of the host between those of the device. What it reads is copied from the twins
// (twins.h) if it is only there.
#pragma once

#include <memory>
#include <span>
#include <utility>

#include "ops/device.h"
#include "ops/gpu/context/twins.h"

namespace flownpu::gpu {

class HostStep final : public Step {
 public:
  HostStep(const Node& node, std::shared_ptr<Context> context, std::unique_ptr<Step> step)
      : reads_(node.op_type != "Shape"), context_(std::move(context)), step_(std::move(step)) {}

  // Shapes may depend on the contents of inputs.
  void infer(std::span<const Tensor> inputs, std::span<Shape> outputs) const override {
    if (reads_) context_->twins().to_host(*context_, inputs);
    step_->infer(inputs, outputs);
  }
  void run(std::span<const Tensor> inputs, std::span<const Tensor> outputs,
           std::span<std::byte> scratch) const override {
    step_->run(inputs, outputs, scratch);
    context_->twins().written_by_host(outputs);
  }
  std::size_t scratch_bytes(std::span<const Tensor> inputs) const override {
    return step_->scratch_bytes(inputs);
  }
  std::optional<std::size_t> same_as(std::size_t output,
                                     std::span<const Tensor> inputs) const override {
    return step_->same_as(output, inputs);
  }
  std::optional<std::size_t> streamed_input() const override { return step_->streamed_input(); }
  std::optional<Slicing> slicing(const Node& node) const override { return step_->slicing(node); }
  std::int64_t multiply_adds() const override { return step_->multiply_adds(); }

 private:
  bool reads_;
  std::shared_ptr<Context> context_;
  std::unique_ptr<Step> step_;
};

}  // namespace flownpu::gpu
