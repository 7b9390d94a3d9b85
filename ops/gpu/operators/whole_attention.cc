// SPDX-License-Identifier: Apache-2.0
// Attention without a cache: over other tokens or the same, of any head size, with a mask or
// without.
#include <algorithm>
#include <cmath>
#include <vector>

#include "ops/error.h"
#include "ops/gpu/kernels/kernels.h"
#include "ops/gpu/operators/run.h"
#include "ops/gpu/operators/step.h"

namespace flownpu::gpu {
namespace {

enum Input : std::uint8_t { kQ, kK, kV, kMask, kPast };

// The host has checked ranks and sizes.
AttentionShape shape_of(const Node& node, const DeviceFacts& facts) {
  const Shape query = node.input(kQ)->shape.value_or(Shape{0, 0, 0});
  const Shape key = node.input(kK)->shape.value_or(Shape{0, 0, 0});
  AttentionShape shape;
  shape.is_whole = true;
  shape.by_head = query.rank() == 4;
  shape.heads = shape.by_head ? query[1] : node.required_integer("q_num_heads");
  shape.kv_heads = shape.by_head ? key[1] : node.required_integer("kv_num_heads");
  shape.head_size = shape.by_head ? query[3] : query[2] / shape.heads;
  shape.cache = element_of(node.input(kQ)->type);
  shape.softcap = node.number("softcap", 0);
  shape.causal = node.integer("is_causal", 0) != 0;
  shape.scale = node.number("scale", 0);
  if (shape.scale == 0) shape.scale = 1 / std::sqrt(static_cast<float>(shape.head_size));
  if (const Value* mask = node.input(kMask); mask != nullptr) {
    shape.has_mask = true;
    shape.mask = mask->type == DataType::kBool ? Element::kInt8 : element_of(mask->type);
  }
  shape.in_tiles = true;
  shape.lanes = attention_lanes(facts);
  return shape;
}

class WholeAttention final : public HostCheckedStep {
 public:
  WholeAttention(const Node& node, StepArguments arguments)
      : HostCheckedStep(node, std::move(arguments)), shape_(shape_of(node, context().facts())) {
    const std::int64_t bytes = flow_attention_memory(shape_);
    if (const std::int64_t most = context().facts().local_memory; bytes > most)
      fail("[", name(), "] expected heads that take at most ", most,
           " bytes of a work-group's memory on ", context().facts().title(), ", got ", bytes,
           ": use device = cpu");
  }

  void run(std::span<const Tensor> inputs, std::span<const Tensor> outputs,
           std::span<std::byte> /*scratch*/) const override {
    if (outputs[0].shape.elements() == 0) return;
    const int of_tokens = shape_.by_head ? 2 : 1;
    const std::int64_t tokens = inputs[kQ].shape[of_tokens];
    const std::int64_t keys = inputs[kK].shape[of_tokens];
    Run run(context());
    const Buffer* y = run.output(outputs[0]);
    std::vector<const Buffer*> buffers{at(run, inputs, kQ), at(run, inputs, kK),
                                       at(run, inputs, kV), y};
    std::vector<std::int64_t> parameters{tokens, keys, 0};
    if (shape_.has_mask) {
      buffers.push_back(at(run, inputs, kMask));
      const Shape& mask = inputs[kMask].shape;
      for (int axis = -4; axis < 0; ++axis)
        parameters.push_back(-axis > mask.rank() ? 1 : mask[axis]);
    }
    run.launch(*prepared({}, [&] { return flow_attention(shape_); }).kernel,
               flow_attention_grid(shape_, inputs[kQ].shape[0], tokens), buffers, parameters);
    run.read(y, outputs[0]);
  }

 private:
  AttentionShape shape_;
};

}  // namespace

std::string refused_whole_attention(const Node& node) {
  const bool has_presents =
      std::ranges::any_of(node.outputs.begin() + 1, node.outputs.end(),
                          [](const Value& value) { return !value.name.empty(); });
  if (node.input(kPast) != nullptr || has_presents)
    return "expected attention without a cache on device 'gpu'";
  Node of_floats = node;
  of_floats.inputs.resize(kMask);
  return refused_floats(of_floats);
}

std::unique_ptr<Step> make_whole_attention(const Node& node, StepArguments arguments) {
  return std::make_unique<WholeAttention>(node, std::move(arguments));
}

}  // namespace flownpu::gpu
