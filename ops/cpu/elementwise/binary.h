// SPDX-License-Identifier: Apache-2.0
// One element of each of two tensors to one of the output, with numpy's broadcasting.
#pragma once

#include <cstdint>
#include <span>

#include "ops/cpu/broadcast.h"
#include "ops/cpu/step.h"

namespace flownpu::cpu {

// output = function(a, b), from elements of type T to elements of type Result.
template <typename T, typename Result, typename Function>
void combine(const Context& context, std::span<const Tensor> inputs, const Tensor& output,
             const Function& function) {
  const Broadcast<2> broadcast(output.shape, {&inputs[0].shape, &inputs[1].shape});
  in_parallel(*context.pool, output.shape.elements(), [&](auto begin, auto end) {
    broadcast.walk(begin, end, [&](auto first, auto count, const auto& offsets) {
      const T* a = inputs[0].as<const T>() + offsets[0];
      const T* b = inputs[1].as<const T>() + offsets[1];
      Result* y = output.as<Result>() + first;
      with_step(broadcast.step(0), [&](auto step_a) {
        with_step(broadcast.step(1), [&](auto step_b) {
          for (std::int64_t i = 0; i < count; ++i) y[i] = function(a[i * step_a], b[i * step_b]);
        });
      });
    });
  });
}

// The base of all operators of two tensors: the output's shape, and how a long prompt is cut.
class Binary : public Step {
 public:
  Binary(const Node& node, const Context& context) : context_(context), name_(to_string(node)) {}

  std::optional<Slicing> slicing(const Node& node) const override { return slice_elements(node); }

  void infer(std::span<const Tensor> inputs, std::span<Shape> outputs) const override {
    outputs[0] = broadcast_shapes(name_, inputs[0].shape, inputs[1].shape);
  }

 protected:
  const Context& context() const { return context_; }
  const std::string& name() const { return name_; }

 private:
  Context context_;
  std::string name_;
};

}  // namespace flownpu::cpu
