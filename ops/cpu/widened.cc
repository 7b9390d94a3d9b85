// SPDX-License-Identifier: Apache-2.0
#include "ops/cpu/widened.h"

#include <algorithm>
#include <array>
#include <bitset>
#include <string>
#include <utility>

#include "ops/cpu/broadcast.h"
#include "ops/error.h"

namespace flownpu::cpu {
namespace {

// Values that a step may have on either side; of the operators with 16-bit floats only Max, Min and
// Concat take any number.
constexpr std::size_t kMost = 32;
using Places = std::bitset<kMost>;

bool is_narrow(DataType type) { return type == DataType::kFloat16 || type == DataType::kBFloat16; }

void fail_of(const Node& node) {
  fail("[", to_string(node), "] expected at most ", kMost, " inputs beside 16-bit floats, got ",
       node.inputs.size());
}

class Widened final : public Step {
 public:
  // `inputs`, `outputs`: the places of those that are copied.
  Widened(const Node& node, const Context& context, std::unique_ptr<Step> step, Places inputs,
          Places outputs)
      : context_(context),
        step_(std::move(step)),
        inputs_(inputs),
        outputs_(outputs),
        output_count_(node.outputs.size()) {}

  std::optional<Slicing> slicing(const Node& node) const override { return step_->slicing(node); }
  std::int64_t multiply_adds() const override { return step_->multiply_adds(); }

  void infer(std::span<const Tensor> inputs, std::span<Shape> outputs) const override {
    step_->infer(wide(inputs, inputs_), outputs);
  }

  std::size_t scratch_bytes(std::span<const Tensor> inputs) const override {
    Scratch scratch;
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      if (inputs_[i]) scratch.take<float>(inputs[i].shape.elements());
    }
    std::array<Shape, kMost> shapes;
    infer(inputs, std::span(shapes).first(output_count_));
    for (std::size_t i = 0; i < output_count_; ++i) {
      if (outputs_[i]) scratch.take<float>(shapes[i].elements());
    }
    return scratch.bytes() + step_->scratch_bytes(wide(inputs, inputs_));
  }

  void run(std::span<const Tensor> inputs, std::span<const Tensor> outputs,
           std::span<std::byte> memory) const override {
    Scratch scratch(memory.data());
    const WideTensors from = wide(inputs, inputs_);
    const WideTensors to = wide(outputs, outputs_);
    std::array<Tensor, kMost> sources = from.all;
    std::array<Tensor, kMost> results = to.all;
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      if (!inputs_[i]) continue;
      auto* copy = scratch.take<float>(inputs[i].shape.elements());
      if (inputs[i].data == nullptr) continue;
      sources[i].data = copy;
      const auto* x = inputs[i].as<const std::uint16_t>();
      in_parallel(*context_.pool, inputs[i].shape.elements(), [&](auto begin, auto end) {
        context_.kernels.widen(x + begin, inputs[i].type, copy + begin, end - begin);
      });
    }
    for (std::size_t i = 0; i < outputs.size(); ++i) {
      if (!outputs_[i]) continue;
      auto* copy = scratch.take<float>(outputs[i].shape.elements());
      if (outputs[i].data != nullptr) results[i].data = copy;
    }
    step_->run(std::span(sources).first(inputs.size()), std::span(results).first(outputs.size()),
               memory.subspan(scratch.bytes()));
    for (std::size_t i = 0; i < outputs.size(); ++i) {
      if (!outputs_[i] || outputs[i].data == nullptr) continue;
      auto* y = outputs[i].as<std::uint16_t>();
      const auto* wide = results[i].as<const float>();
      in_parallel(*context_.pool, outputs[i].shape.elements(), [&](auto begin, auto end) {
        context_.kernels.store_cache(wide + begin, y + begin, outputs[i].type, end - begin);
      });
    }
  }

 private:
  struct WideTensors {
    std::array<Tensor, kMost> all;
    std::size_t count;
    operator std::span<const Tensor>() const {  // NOLINT(google-explicit-constructor)
      return std::span(all).first(count);
    }
  };

  // The tensors, of which those that are copied have the type float32.
  static WideTensors wide(std::span<const Tensor> tensors, const Places& places) {
    WideTensors made{{}, tensors.size()};
    std::ranges::copy(tensors, made.all.begin());
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      if (places[i]) made.all[i].type = DataType::kFloat32;
    }
    return made;
  }

  Context context_;
  std::unique_ptr<Step> step_;
  Places inputs_;
  Places outputs_;
  std::size_t output_count_;
};

}  // namespace

std::unique_ptr<Step> make_widened(const Node& node, const Context& context, MakeStep make,
                                   std::size_t kept) {
  Node wide = node;
  const auto widen = [&node](std::vector<Value>& values, std::size_t left) {
    Places places;
    for (std::size_t i = 0; i < values.size(); ++i) {
      Value& value = values[i];
      if (value.name.empty() || !is_narrow(value.type)) continue;
      if (i == left && value.constant != nullptr) continue;
      if (i >= kMost) fail_of(node);
      value.type = DataType::kFloat32;
      value.constant = nullptr;
      places[i] = true;
    }
    return places;
  };
  const Places inputs = widen(wide.inputs, kept);
  const Places outputs = widen(wide.outputs, kNoInput);
  if (inputs.none() && outputs.none()) return make(node, context);
  if (node.inputs.size() > kMost) fail_of(node);
  return std::make_unique<Widened>(node, context, make(wide, context), inputs, outputs);
}

}  // namespace flownpu::cpu
