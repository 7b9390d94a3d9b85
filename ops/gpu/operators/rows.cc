// SPDX-License-Identifier: Apache-2.0
// Operators on rows: norms, RMS norms with a residual or without, Softmax, rotation, and ArgMax.
#include <algorithm>
#include <vector>

#include "ops/error.h"
#include "ops/gpu/kernels/kernels.h"
#include "ops/gpu/operators/run.h"
#include "ops/gpu/operators/step.h"

namespace flownpu::gpu {
namespace {

std::int64_t rows_of(const Shape& shape) {
  return shape[-1] == 0 ? 0 : shape.elements() / shape[-1];
}

class RmsNorm final : public HostCheckedStep {
 public:
  RmsNorm(const Node& node, StepArguments arguments)
      : HostCheckedStep(node, std::move(arguments)),
        has_skip_(node.op_type == "SkipSimplifiedLayerNormalization"),
        epsilon_(node.number("epsilon", 1e-5F)) {}

  void run(std::span<const Tensor> inputs, std::span<const Tensor> outputs,
           std::span<std::byte> /*scratch*/) const override {
    const Tensor& x = inputs[0];
    const std::int64_t rows = rows_of(x.shape);
    if (rows == 0) return;
    const bool keeps = outputs.size() > 3 && outputs[3].data != nullptr;
    const KernelDescription kernel = rms_norm(
        {.columns = x.shape[-1], .epsilon = epsilon_, .has_skip = has_skip_, .writes_sum = keeps});
    Run run(context());
    const Buffer* y = run.output(outputs[0]);
    std::vector<const Buffer*> buffers{at(run, inputs, 0), at(run, inputs, has_skip_ ? 2 : 1), y};
    std::vector<std::int64_t> parameters;
    if (has_skip_) {
      buffers.push_back(at(run, inputs, 1));
      parameters.push_back(rows_of(inputs[1].shape));
    }
    if (keeps) buffers.push_back(run.output(outputs[3]));
    run.launch(kernel, {.groups = {rows, 1, 1}, .lanes = kernel.lanes}, buffers, parameters);
    run.read(y, outputs[0]);
    if (keeps) run.read(buffers.back(), outputs[3]);
  }

 private:
  bool has_skip_;
  float epsilon_;
};

// com.microsoft's RotaryEmbedding, of [batch, tokens, heads x head size] or [batch, heads, tokens,
// head size].
class RotaryEmbedding final : public HostCheckedStep {
 public:
  RotaryEmbedding(const Node& node, StepArguments arguments)
      : HostCheckedStep(node, std::move(arguments)),
        interleaved_(node.integer("interleaved", 0) != 0),
        heads_(node.integer("num_heads", 0)) {}

  void run(std::span<const Tensor> inputs, std::span<const Tensor> outputs,
           std::span<std::byte> /*scratch*/) const override {
    const Shape& x = inputs[0].shape;
    const std::int64_t rows = rows_of(x);
    if (rows == 0) return;
    const std::int64_t half = inputs[2].shape[1];
    const std::int64_t per_head = heads_ > 0 ? x[-1] / heads_ : 2 * half;
    const RotationShape shape{.width = x[-1],
                              .head_size = x.rank() == 4 ? x[-1] : per_head,
                              .half = half,
                              .interleaved = interleaved_};
    const std::vector<std::int32_t> positions = positions_of(inputs);
    Run run(context());
    const Buffer* y = run.output(outputs[0]);
    run.launch(rotary_embedding(shape), rotary_embedding_grid(shape, rows),
               {at(run, inputs, 0), run.input(std::span<const std::int32_t>(positions)),
                at(run, inputs, 2), at(run, inputs, 3), y});
    run.read(y, outputs[0]);
  }

 private:
  // The position of each row of X; the host has checked them.
  static std::vector<std::int32_t> positions_of(std::span<const Tensor> inputs) {
    const Shape& x = inputs[0].shape;
    const std::int64_t tokens = x[x.rank() == 4 ? 2 : 1];
    const auto* ids = inputs[1].as<const std::int64_t>();
    const bool counts_on = inputs[1].shape.rank() < 2;
    std::vector<std::int32_t> positions;
    for (std::int64_t row = 0; row < rows_of(x); ++row) {
      const std::int64_t token = row % tokens;
      const std::int64_t batch = row / tokens / (x.rank() == 4 ? x[1] : 1);
      const std::int64_t id = counts_on ? ids[0] + token : ids[batch * tokens + token];
      positions.push_back(static_cast<std::int32_t>(id));
    }
    return positions;
  }

  bool interleaved_;
  std::int64_t heads_;
};

class ArgMax final : public HostCheckedStep {
 public:
  ArgMax(const Node& node, StepArguments arguments) : HostCheckedStep(node, std::move(arguments)) {}

  void run(std::span<const Tensor> inputs, std::span<const Tensor> outputs,
           std::span<std::byte> /*scratch*/) const override {
    const std::int64_t rows = rows_of(inputs[0].shape);
    if (rows == 0) return;
    const KernelDescription kernel = argmax(inputs[0].shape[-1]);
    std::vector<std::int32_t> found(static_cast<std::size_t>(rows));
    {
      Run run(context());
      const Buffer* y = run.output(found.size() * sizeof(found[0]));
      run.launch(kernel, {.groups = {rows, 1, 1}, .lanes = kernel.lanes}, {at(run, inputs, 0), y});
      run.read(y, std::as_writable_bytes(std::span(found)));
    }
    std::ranges::copy(found, outputs[0].as<std::int64_t>());
    context().twins().written_by_host(outputs);
  }
};

class Softmax final : public HostCheckedStep {
 public:
  Softmax(const Node& node, StepArguments arguments)
      : HostCheckedStep(node, std::move(arguments)),
        kernel_(softmax(element_of(node.inputs[0].type))) {}

  void run(std::span<const Tensor> inputs, std::span<const Tensor> outputs,
           std::span<std::byte> /*scratch*/) const override {
    const std::int64_t rows = rows_of(inputs[0].shape);
    if (rows == 0) return;
    Run run(context());
    const Buffer* y = run.output(outputs[0]);
    run.launch(*prepared({}, [&] { return kernel_; }).kernel,
               {.groups = {rows, 1, 1}, .lanes = kernel_.lanes}, std::vector{at(run, inputs, 0), y},
               std::vector{inputs[0].shape[-1]});
    run.read(y, outputs[0]);
  }

 private:
  KernelDescription kernel_;
};

// LayerNormalization over the last axes, and the norms of groups of channels.
class LayerNorm final : public HostCheckedStep {
 public:
  LayerNorm(const Node& node, StepArguments arguments, bool is_of_groups)
      : HostCheckedStep(node, std::move(arguments)),
        is_of_groups_(is_of_groups),
        groups_(node.integer("num_groups", node.integer("groups", kChannels))),
        axis_(node.integer("axis", -1)),
        kernel_(layer_norm({.given = element_of(node.outputs[0].type),
                            .epsilon = node.number("epsilon", 1e-5F),
                            .has_shift = node.input(2) != nullptr,
                            .is_silu = node.integer("activation", 0) != 0})) {}

  void run(std::span<const Tensor> inputs, std::span<const Tensor> outputs,
           std::span<std::byte> /*scratch*/) const override {
    const Shape& x = inputs[0].shape;
    if (x.elements() == 0) return;
    const std::int64_t groups = !is_of_groups_ ? 1 : groups_ == kChannels ? x[1] : groups_;
    const std::int64_t front = axis_ < 0 ? axis_ + x.rank() : axis_;
    std::int64_t rows = is_of_groups_ ? x[0] * groups : 1;
    for (int axis = 0; !is_of_groups_ && axis < front; ++axis) rows *= x[axis];
    std::int64_t pixels = 1;
    for (int axis = 2; is_of_groups_ && axis < x.rank(); ++axis) pixels *= x[axis];
    Run run(context());
    const Buffer* y = run.output(outputs[0]);
    std::vector<const Buffer*> buffers{at(run, inputs, 0), at(run, inputs, 1), y};
    if (kernel_.tensors.size() > buffers.size()) buffers.push_back(at(run, inputs, 2));
    run.launch(*prepared({}, [&] { return kernel_; }).kernel,
               {.groups = {rows, 1, 1}, .lanes = kernel_.lanes}, buffers,
               std::vector{x.elements() / rows, groups, pixels});
    run.read(y, outputs[0]);
  }

 private:
  // As many groups as channels.
  static constexpr std::int64_t kChannels = 0;

  bool is_of_groups_;
  std::int64_t groups_;
  std::int64_t axis_;
  KernelDescription kernel_;
};

}  // namespace

std::unique_ptr<Step> make_rms_norm(const Node& node, StepArguments arguments) {
  if (node.op_type == "LayerNormalization")
    return std::make_unique<LayerNorm>(node, std::move(arguments), false);
  return std::make_unique<RmsNorm>(node, std::move(arguments));
}

std::unique_ptr<Step> make_group_norm(const Node& node, StepArguments arguments) {
  return std::make_unique<LayerNorm>(node, std::move(arguments), true);
}

std::unique_ptr<Step> make_rotary_embedding(const Node& node, StepArguments arguments) {
  return std::make_unique<RotaryEmbedding>(node, std::move(arguments));
}

std::string refused_softmax(const Node& node) {
  const Value& x = *node.input(0);
  const std::int64_t axis = node.integer("axis", node.since_version < 13 ? 1 : -1);
  if (axis == -1 || (x.shape && axis == x.shape->rank() - 1)) return refused_floats(node);
  return "expected the last axis on device 'gpu'";
}

std::unique_ptr<Step> make_softmax(const Node& node, StepArguments arguments) {
  return std::make_unique<Softmax>(node, std::move(arguments));
}

std::string refused_argmax(const Node& node) {
  const Value& x = *node.input(0);
  const std::int64_t axis = node.integer("axis", 0);
  const bool is_last = axis == -1 || (x.shape && axis == x.shape->rank() - 1);
  if (is_last && x.type == DataType::kFloat32 && node.integer("select_last_index", 0) == 0)
    return "";
  return "expected float along the last axis, and the first of equals, on device 'gpu'";
}

std::unique_ptr<Step> make_argmax(const Node& node, StepArguments arguments) {
  return std::make_unique<ArgMax>(node, std::move(arguments));
}

}  // namespace flownpu::gpu
