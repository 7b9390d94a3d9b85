// SPDX-License-Identifier: Apache-2.0
// CheckedStep: a step whose inputs' shapes are compared with its operator's contract in each run,
// before anything of them is read.
#pragma once

#include <memory>
#include <string>
#include <utility>

#include "ops/device.h"
#include "ops/nodes/contract.h"

namespace flownpu::cpu {

class CheckedStep final : public Step {
 public:
  CheckedStep(const Contract& contract, std::string name, std::unique_ptr<Step> step)
      : contract_(contract), name_(std::move(name)), step_(std::move(step)) {}

  void infer(std::span<const Tensor> inputs, std::span<Shape> outputs) const override {
    check_shapes(contract_, name_, inputs);
    step_->infer(inputs, outputs);
  }
  std::size_t scratch_bytes(std::span<const Tensor> inputs) const override {
    return step_->scratch_bytes(inputs);
  }
  void run(std::span<const Tensor> inputs, std::span<const Tensor> outputs,
           std::span<std::byte> scratch) const override {
    step_->run(inputs, outputs, scratch);
  }
  std::optional<std::size_t> repeated_input() const override { return step_->repeated_input(); }
  std::optional<std::size_t> streamed_input() const override { return step_->streamed_input(); }
  std::optional<Slicing> slicing(const Node& node) const override { return step_->slicing(node); }
  std::int64_t multiply_adds() const override { return step_->multiply_adds(); }

 private:
  Contract contract_;  // its spans view constants
  std::string name_;
  std::unique_ptr<Step> step_;
};

}  // namespace flownpu::cpu
