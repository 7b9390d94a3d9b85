// SPDX-License-Identifier: Apache-2.0
#include "ops/gpu/operators/step.h"

#include <algorithm>
#include <utility>

namespace flownpu::gpu {
namespace {

constexpr std::string_view kOnnx;
constexpr std::string_view kMicrosoft = "com.microsoft";

bool is_float(DataType type) {
  return type == DataType::kFloat32 || type == DataType::kFloat16 || type == DataType::kBFloat16;
}

std::string takes_all(const Node& /*node*/) { return ""; }

}  // namespace

std::string refused_floats(const Node& node) {
  const auto is_other = [](const Value& value) {
    return !value.name.empty() && !is_float(value.type);
  };
  for (const auto* values : {&node.inputs, &node.outputs}) {
    if (const auto other = std::ranges::find_if(*values, is_other); other != values->end())
      return "expected values of floats on device 'gpu', got " + std::string(name_of(other->type));
  }
  return "";
}

std::span<const Operator> operators() {
  static const std::vector<Operator> all = [] {
    std::vector<Operator> made{
        {kDomain, "Q4NXMatMul", make_product, takes_all, true},
        {kDomain, "FusedDQP", make_product, takes_all, true},
        {kDomain, "Q4NXMoE", make_experts, takes_all, true},
        {kDomain, "DenseMatMul", make_dense_product, takes_all, true},
        {kOnnx, "MatMul", make_activations_product, refused_floats, true},
        {kOnnx, "Conv", make_convolution, refused_convolution, true},
        {kMicrosoft, "FusedConv", make_convolution, refused_convolution, true},
        {kDomain, "Q4NXGather", make_gather, takes_all},
        {kDomain, "FlowQKVAttention", make_attention, refused_attention, true},
        {kDomain, "FlowKVAttention", make_attention, refused_attention, true},
        {kOnnx, "Attention", make_whole_attention, refused_whole_attention, true},
        {kOnnx, "SimplifiedLayerNormalization", make_rms_norm, refused_floats},
        {kOnnx, "RMSNormalization", make_rms_norm, refused_floats},
        {kOnnx, "LayerNormalization", make_rms_norm, refused_floats},
        {kMicrosoft, "SkipSimplifiedLayerNormalization", make_rms_norm, refused_floats},
        {kOnnx, "GroupNormalization", make_group_norm, refused_floats},
        {kMicrosoft, "GroupNorm", make_group_norm, refused_floats},
        {kOnnx, "InstanceNormalization", make_group_norm, refused_floats},
        {kOnnx, "Softmax", make_softmax, refused_softmax},
        {kMicrosoft, "RotaryEmbedding", make_rotary_embedding, takes_all},
        {kMicrosoft, "CausalConvWithState", make_causal_convolution, refused_causal_convolution},
        {kMicrosoft, "LinearAttention", make_linear_attention, refused_linear_attention},
        {kMicrosoft, "GatedRMSNorm", make_gated_norm, refused_gated_norm},
        {kOnnx, "ArgMax", make_argmax, refused_argmax}};
    for (const std::string_view name :
         {"Abs", "Add", "Cos", "Div", "Erf", "Exp", "Gelu", "Log", "Mul", "Neg", "Pow",
          "Reciprocal", "Relu", "Sigmoid", "Sin", "Sqrt", "Sub", "Swish", "Tanh"})
      made.push_back({kOnnx, name, make_elementwise, refused_floats});
    for (const std::string_view name : {"Gelu", "QuickGelu"})
      made.push_back({kMicrosoft, name, make_elementwise, refused_floats});
    for (const std::string_view name :
         {"Cast", "Concat", "Expand", "Flatten", "Identity", "Reshape", "Resize", "Slice", "Split",
          "Squeeze", "Transpose", "Unsqueeze"})
      made.push_back({kOnnx, name, make_move, refused_move});
    return made;
  }();
  return all;
}

const Operator* find_operator(std::string_view domain, std::string_view op_type) {
  const auto found = std::ranges::find_if(operators(), [&](const Operator& one) {
    return one.domain == domain && one.op_type == op_type;
  });
  return found == operators().end() ? nullptr : &*found;
}

HostCheckedStep::HostCheckedStep(const Node& node, StepArguments arguments)
    : context_(std::move(arguments.context)),
      host_(std::move(arguments.host)),
      name_(to_string(node)) {
  for (std::size_t index = 0; index < node.inputs.size(); ++index) {
    const Value& value = node.inputs[index];
    if (value.constant != nullptr && (is_float(value.type) || value.type == DataType::kInt8))
      constants_.emplace(index, upload(*context_, value));
  }
}

const Buffer* HostCheckedStep::at(Run& run, std::span<const Tensor> inputs,
                                  std::size_t index) const {
  const auto constant = constants_.find(index);
  return constant != constants_.end() ? &constant->second : run.input(inputs[index]);
}

const HostCheckedStep::Prepared& HostCheckedStep::prepared(
    std::vector<std::int64_t> numbers, const std::function<KernelDescription()>& make) const {
  const auto found = std::ranges::find(kernels_, numbers, &Prepared::numbers);
  if (found != kernels_.end()) return *found;
  const KernelDescription kernel = make();
  return kernels_.emplace_back(std::move(numbers), context_->compile(kernel), kernel.lanes);
}

}  // namespace flownpu::gpu
