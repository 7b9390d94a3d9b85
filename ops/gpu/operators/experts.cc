// SPDX-License-Identifier: Apache-2.0
// Q4NXMoE: the host routes rows and adds up the experts' answers, as on the CPU device; the device
// multiplies the rows of each expert that was chosen by its weights, whose codes stay what they
// are. Between its two products the host applies what the products' kernels do not: biases, and the
// SwiGLU of gpt-oss.
#include <algorithm>
#include <array>
#include <limits>
#include <optional>
#include <utility>
#include <vector>

#include "ops/cpu/products/q4nx_moe.h"
#include "ops/error.h"
#include "ops/formats/q4nx.h"
#include "ops/gpu/operators/host_step.h"
#include "ops/gpu/operators/step.h"
#include "ops/gpu/operators/weight_product.h"
#include "ops/nodes/q4nx_moe.h"

namespace flownpu::gpu {
namespace {

using cpu::ExpertRows;
using cpu::RowsByExpert;

// The weight of one expert among those of all, which follow one another.
Value of_expert(const Value& weights, std::int64_t expert, std::int64_t experts) {
  Value weight = weights;
  Shape shape = weights.shape.value_or(Shape{0});
  shape[0] /= experts;
  weight.constant = static_cast<const std::byte*>(weights.constant) + expert * shape.elements();
  weight.shape = shape;
  return weight;
}

// A bias of all experts as the node has it, kept beside the weights on the device.
std::vector<float> bias_of(const Node& node, MoeInput input) {
  const Value* bias = node.input(input);
  if (bias == nullptr) return {};
  const auto* first = static_cast<const float*>(bias->constant);
  return {first, first + bias->shape.value_or(Shape{0}).elements()};
}

cpu::SwigluScale scale_of(const Node& node) {
  cpu::SwigluScale scale{.alpha = node.number("swiglu_alpha", 1),
                         .beta = node.number("swiglu_beta", 0)};
  if (const float limit = node.number("swiglu_limit", 0); limit > 0) scale.limit = limit;
  return scale;
}

class DeviceExperts final : public cpu::ExpertProducts {
 public:
  DeviceExperts(const Node& node, const StepArguments& arguments)
      : context_(arguments.context),
        host_(arguments.host_context),
        hidden_(node.required_integer("hidden_size")),
        inner_(node.required_integer("expert_size")),
        gate_up_bias_(bias_of(node, kMoeGateUpBias)),
        down_bias_(bias_of(node, kMoeDownBias)),
        scale_(scale_of(node)),
        gates_on_host_(!gate_up_bias_.empty() || scale_.alpha != 1 || scale_.beta != 0 ||
                       scale_.limit != std::numeric_limits<float>::infinity()),
        is_geglu_(node.text("gating", "swiglu") == "geglu") {
    const std::int64_t experts = node.required_integer("num_experts");
    const Gating gating = is_geglu_ ? Gating::kGeGlu : Gating::kSwiGlu;
    const auto product = [&](MoeInput input, ProductShape shape, std::int64_t expert) {
      const Value& weights = node.inputs[input];
      shape.layout = q4nx::layout_of(weights.shape.value_or(Shape{0})).value_or(q4nx::kNarrow);
      return WeightProduct(*context_, of_expert(weights, expert, experts), shape,
                           arguments.activations, arguments.weights, arguments.matrices);
    };
    for (std::int64_t expert = 0; expert < experts; ++expert) {
      const ProductShape gate_up{.rows = gates_on_host_ ? 2 * padded_inner() : inner_,
                                 .columns = hidden_,
                                 .gating = gates_on_host_ ? Gating::kNone : gating};
      gate_up_.push_back(product(kMoeGateUp, gate_up, expert));
      down_.push_back(product(kMoeDown, {.rows = hidden_, .columns = inner_}, expert));
    }
  }

  // The weights are on the device.
  bool takes(const RowsByExpert& /*by_expert*/) const override { return true; }

  void answer(const float* x, const RowsByExpert& by_expert, float* answers) const override {
    Run run(*context_);
    const std::vector<ExpertRows> groups = by_expert.whole_groups();
    std::vector<const Buffer*> inside;
    for (const ExpertRows& rows : groups) {
      const WeightProduct& product = gate_up_[static_cast<std::size_t>(rows.expert)];
      inside.push_back(output(run, rows.count * product.shape().rows));
      product.enqueue(run, rows.count, given(run, x, by_expert, rows), inside.back());
    }
    if (gates_on_host_) gate(run, groups, inside);
    std::vector<const Buffer*> made;
    for (std::size_t i = 0; i < groups.size(); ++i) {
      made.push_back(output(run, groups[i].count * hidden_));
      down_[static_cast<std::size_t>(groups[i].expert)].enqueue(run, groups[i].count, inside[i],
                                                                made[i]);
    }
    for (std::size_t i = 0; i < groups.size(); ++i) read_answers(run, groups[i], made[i], answers);
  }

 private:
  // Rows of the up projection begin behind the gate's, which fill whole blocks.
  std::int64_t padded_inner() const { return q4nx::row_blocks(inner_) * q4nx::kBlockRows; }

  static const Buffer* output(Run& run, std::int64_t floats) {
    return run.output(static_cast<std::size_t>(floats) * sizeof(float));
  }

  const Buffer* given(Run& run, const float* x, const RowsByExpert& by_expert,
                      const ExpertRows& rows) const {
    std::vector<float> all(static_cast<std::size_t>(rows.count * hidden_));
    for (std::int64_t i = 0; i < rows.count; ++i)
      std::copy_n(x + by_expert.row(rows.first + i) * hidden_, hidden_, all.data() + i * hidden_);
    return run.input(std::span<const float>(all));
  }

  // Replaces gates and up projections [count][2][padded inner] by what the down projections take.
  void gate(Run& run, const std::vector<ExpertRows>& groups,
            std::vector<const Buffer*>& inside) const {
    const std::int64_t up = padded_inner();
    for (std::size_t i = 0; i < groups.size(); ++i) {
      const ExpertRows& rows = groups[i];
      std::vector<float> products(static_cast<std::size_t>(std::int64_t{2} * rows.count * up));
      run.read(inside[i], std::as_writable_bytes(std::span(products)));
      std::vector<float> gated(static_cast<std::size_t>(rows.count * inner_));
      const float* bias = gate_up_bias_.empty()
                              ? nullptr
                              : gate_up_bias_.data() + std::int64_t{2} * rows.expert * inner_;
      for (std::int64_t row = 0; row < rows.count; ++row) {
        float* gates = products.data() + 2 * row * up;
        if (bias != nullptr) {
          host_.kernels.add(gates, bias, gates, inner_);
          host_.kernels.add(gates + up, bias + inner_, gates + up, inner_);
        }
        float* y = gated.data() + row * inner_;
        if (is_geglu_)
          host_.kernels.geglu(gates, gates + up, y, inner_);
        else
          host_.kernels.scaled_swiglu(gates, gates + up, scale_, y, inner_);
      }
      inside[i] = run.input(std::span<const float>(gated));
    }
  }

  void read_answers(Run& run, const ExpertRows& rows, const Buffer* made, float* answers) const {
    const std::span to(answers + std::int64_t{rows.first} * hidden_,
                       static_cast<std::size_t>(rows.count * hidden_));
    run.read(made, std::as_writable_bytes(to));
    if (down_bias_.empty()) return;
    for (std::int64_t row = 0; row < rows.count; ++row) {
      float* answer = to.data() + row * hidden_;
      host_.kernels.add(answer, down_bias_.data() + rows.expert * hidden_, answer, hidden_);
    }
  }

  std::shared_ptr<Context> context_;
  cpu::Context host_;
  std::int64_t hidden_;
  std::int64_t inner_;
  std::vector<float> gate_up_bias_;
  std::vector<float> down_bias_;
  cpu::SwigluScale scale_;
  bool gates_on_host_;
  bool is_geglu_;
  std::vector<WeightProduct> gate_up_;
  std::vector<WeightProduct> down_;
};

}  // namespace

std::unique_ptr<Step> make_experts(const Node& node, StepArguments arguments) {
  return std::make_unique<HostStep>(
      node, arguments.context,
      cpu::make_q4nx_moe(node, arguments.host_context,
                         std::make_unique<DeviceExperts>(node, arguments)));
}

}  // namespace flownpu::gpu
