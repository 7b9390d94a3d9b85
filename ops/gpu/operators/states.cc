// SPDX-License-Identifier: Apache-2.0
// Operators of layers that keep a state: CausalConvWithState, LinearAttention by the gated delta
// rule, GatedRMSNorm. Definitions: ops/cpu/products/causal_convolution.cc,
// ops/cpu/attention/linear_attention.cc and ops/cpu/reductions/gates.cc.
#include <cmath>
#include <utility>

#include "ops/gpu/kernels/states/kernels.h"
#include "ops/gpu/operators/step.h"

namespace flownpu::gpu {
namespace {

constexpr std::size_t kPastState = 3;  // of both operators with a state

// The kernels of this file are compiled for float32 alone.
std::string refused_halves(const Node& node) {
  for (const auto* values : {&node.inputs, &node.outputs})
    for (const Value& value : *values)
      if (!value.name.empty() && value.type != DataType::kFloat32)
        return "expected values of float32 on device 'gpu', got " +
               std::string(name_of(value.type));
  return "";
}

// Why a node with a state is not computed, beside what `fits` says.
std::string refused_state(const Node& node, bool fits, const std::string& expected) {
  const bool has_states = node.input(kPastState) != nullptr && node.has_output(1);
  if (!fits || !has_states)
    return "expected " + expected + ", past_state and present_state on device 'gpu'";
  return refused_halves(node);
}

class CausalConvolution final : public HostCheckedStep {
 public:
  CausalConvolution(const Node& node, StepArguments arguments)
      : HostCheckedStep(node, std::move(arguments)),
        is_silu_(node.text("activation", "none") != "none") {}

  void run(std::span<const Tensor> inputs, std::span<const Tensor> outputs,
           std::span<std::byte> /*scratch*/) const override {
    const Shape& x = inputs[0].shape;
    if (x.elements() == 0) return;
    const ShortConvolutionShape shape{
        .channels = x[2], .taps = inputs[1].shape[2], .columns = x[2], .is_silu = is_silu_};
    Run run(context());
    const Buffer* y = run.output(outputs[0]);
    const Buffer* behind = run.output(outputs[1]);
    run.launch(short_convolution(shape), short_convolution_grid(shape, x[1], x[0]),
               {at(run, inputs, 0), at(run, inputs, 1), at(run, inputs, kPastState), y, behind},
               {0, x[1]});
    run.read(y, outputs[0]);
    run.read(behind, outputs[1]);
  }

 private:
  bool is_silu_;
};

class LinearAttention final : public HostCheckedStep {
 public:
  LinearAttention(const Node& node, StepArguments arguments)
      : HostCheckedStep(node, std::move(arguments)), scale_(node.number("scale", 0)) {}

  void run(std::span<const Tensor> inputs, std::span<const Tensor> outputs,
           std::span<std::byte> /*scratch*/) const override {
    const Shape& query = inputs[0].shape;
    const Shape& state = inputs[kPastState].shape;
    if (query.elements() == 0) return;
    const DeltaShape shape{
        .key_heads = query[2] / state[2],
        .value_heads = state[1],
        .key_size = state[2],
        .value_size = state[3],
        .scale = scale_ == 0 ? 1 / std::sqrt(static_cast<float>(state[2])) : scale_};
    Run run(context());
    const Buffer* y = run.output(outputs[0]);
    const Buffer* behind = run.output(outputs[1]);
    const Buffer* q = at(run, inputs, 0);
    const Buffer* k = at(run, inputs, 1);
    const Buffer* v = at(run, inputs, 2);
    const Buffer* decay = at(run, inputs, 4);
    const Buffer* share = at(run, inputs, 5);
    const Buffer* before = at(run, inputs, kPastState);
    if (takes_chunks(shape, query[1], context().facts().local_memory)) {
      const std::int64_t floats = delta_pairs_floats(shape, query[1], query[0]);
      const Buffer* pairs = run.output(static_cast<std::size_t>(floats) * sizeof(float));
      run.launch(delta_pairs(shape), delta_pairs_grid(shape, query[1], query[0]),
                 {q, k, decay, share, pairs}, {0, query[1]});
      run.launch(gated_delta_chunks(shape), gated_delta_chunks_grid(shape, query[0]),
                 {q, k, v, pairs, before, y, behind}, {0, query[1]});
    } else {
      run.launch(gated_delta(shape), gated_delta_grid(shape, query[0]),
                 {q, k, v, decay, share, before, y, behind}, {0, query[1]});
    }
    run.read(y, outputs[0]);
    run.read(behind, outputs[1]);
  }

 private:
  float scale_;
};

class GatedRmsNorm final : public HostCheckedStep {
 public:
  GatedRmsNorm(const Node& node, StepArguments arguments)
      : HostCheckedStep(node, std::move(arguments)), epsilon_(node.number("epsilon", 1e-5F)) {}

  void run(std::span<const Tensor> inputs, std::span<const Tensor> outputs,
           std::span<std::byte> /*scratch*/) const override {
    const Shape& x = inputs[0].shape;
    if (x.elements() == 0) return;
    const std::int64_t size = inputs[1].shape[0];
    Run run(context());
    const Buffer* y = run.output(outputs[0]);
    run.launch(gated_rms_norm(x[-1], size, epsilon_),
               gated_rms_norm_grid(x[-1], size, x.elements() / x[-1]),
               {at(run, inputs, 0), at(run, inputs, 1), at(run, inputs, 2), y});
    run.read(y, outputs[0]);
  }

 private:
  float epsilon_;
};

}  // namespace

std::string refused_causal_convolution(const Node& node) {
  return refused_state(node,
                       node.integer("channels_last", 0) != 0 && node.integer("dilation", 1) == 1 &&
                           node.input(2) == nullptr,
                       "channels_last, dilation = 1, no bias");
}

std::string refused_linear_attention(const Node& node) {
  const std::int64_t heads = node.integer("kv_num_heads", 0);
  const auto is_of_heads = [&](std::size_t input) {
    const Value* given = node.input(input);
    return given != nullptr && given->shape && (*given->shape)[-1] == heads;
  };
  // Queries have the heads of keys, so that neighbouring heads of values share both.
  const Value* query = node.input(0);
  const Value* key = node.input(1);
  const bool pairs = query != nullptr && key != nullptr && query->shape && key->shape &&
                     (*query->shape)[-1] == (*key->shape)[-1];
  return refused_state(node,
                       node.text("update_rule", "gated_delta") == "gated_delta" && is_of_heads(4) &&
                           is_of_heads(5) && pairs && node.integer("q_num_heads", 0) <= heads,
                       "the gated delta rule, decay and beta of heads, as many queries as keys");
}

std::string refused_gated_norm(const Node& node) {
  if (node.text("activation", "silu") != "silu") return "expected the activation silu";
  return refused_halves(node);
}

std::unique_ptr<Step> make_causal_convolution(const Node& node, StepArguments arguments) {
  return std::make_unique<CausalConvolution>(node, std::move(arguments));
}

std::unique_ptr<Step> make_linear_attention(const Node& node, StepArguments arguments) {
  return std::make_unique<LinearAttention>(node, std::move(arguments));
}

std::unique_ptr<Step> make_gated_norm(const Node& node, StepArguments arguments) {
  return std::make_unique<GatedRmsNorm>(node, std::move(arguments));
}

}  // namespace flownpu::gpu
