// SPDX-License-Identifier: Apache-2.0
// Q4NXMoE, whose weights stay on the device (mixture.h).
#include "ops/gpu/operators/step.h"

#include <memory>
#include <mutex>
#include <span>
#include <utility>
#include <vector>

#include "ops/gpu/operators/experts/mixture.h"
#include "ops/gpu/operators/run.h"

namespace flownpu::gpu {
namespace {

MixtureShape mixture_of(const Node& node) {
  return {.router = {.experts = node.required_integer("num_experts"),
                     .per_row = node.required_integer("experts_per_token"),
                     .hidden = node.required_integer("hidden_size"),
                     .normalizes = node.integer("normalize_routing_weights", 1) != 0},
          .inner = node.required_integer("expert_size"),
          .gating = node.text("gating", "swiglu") == "geglu" ? Gating::kGeGlu : Gating::kSwiGlu,
          .alpha = node.number("swiglu_alpha", 1),
          .beta = node.number("swiglu_beta", 0),
          .limit = node.number("swiglu_limit", 0)};
}

// So that no constant comes to the device twice.
Node without_inputs(Node node) {
  node.inputs.clear();
  return node;
}

class Experts final : public HostCheckedStep {
 public:
  Experts(const Node& node, StepArguments arguments)
      : HostCheckedStep(without_inputs(node), std::move(arguments)),
        weights_(place_mixture(std::span(node.inputs).subspan(kMoeRouter),
                               [&](const Value& value) { return upload(context(), value); })),
        has_logits_(node.input(kMoeLogits) != nullptr) {}

  void compile(const Node& node, const Mixture::Options& options) {
    const std::lock_guard lock(context().mutex());
    mixture_ = std::make_unique<Mixture>(context(), mixture_of(node), weights_, options);
  }

  void run(std::span<const Tensor> inputs, std::span<const Tensor> outputs,
           std::span<std::byte> /*scratch*/) const override {
    const std::int64_t rows = inputs[kMoeX].shape.elements() / inputs[kMoeX].shape[-1];
    if (rows == 0) return;
    Run run(context());
    const Buffer* x = run.input(inputs[kMoeX]);
    const Buffer* logits = has_logits_ ? run.input(inputs[kMoeLogits]) : nullptr;
    const Buffer* y = run.output(outputs[0]);
    mixture_->enqueue(context(), memory_, rows, x, y, nullptr, logits);
    run.read(y, outputs[0]);
  }

 private:
  MixtureWeights weights_;
  bool has_logits_;
  std::unique_ptr<const Mixture> mixture_;
  mutable MixtureMemory memory_;  // under the context's mutex
};

}  // namespace

std::unique_ptr<Step> make_experts(const Node& node, StepArguments arguments) {
  const Mixture::Options options{.rounds = arguments.activations == Activations::kInt8,
                                 .matrices = arguments.matrices};
  auto step = std::make_unique<Experts>(node, std::move(arguments));
  step->compile(node, options);
  return step;
}

}  // namespace flownpu::gpu
