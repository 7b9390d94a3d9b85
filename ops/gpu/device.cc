// SPDX-License-Identifier: Apache-2.0
#include "ops/gpu/device.h"

#include <algorithm>
#include <array>

#include "ops/error.h"
#include "ops/gpu/operators/step.h"

namespace flownpu {
namespace gpu {
namespace {

struct Operator {
  std::string_view op_type;
  std::unique_ptr<Step> (*make)(const Node& node, Making making);
};

constexpr std::array<Operator, 10> kOperators{{{"Q4NXMatMul", make_product},
                                               {"FusedDQP", make_product},
                                               {"Q4NXGather", make_gather},
                                               {"FlowQKVAttention", make_attention},
                                               {"FlowKVAttention", make_attention},
                                               {"SimplifiedLayerNormalization", make_rms_norm},
                                               {"RMSNormalization", make_rms_norm},
                                               {"SkipSimplifiedLayerNormalization", make_rms_norm},
                                               {"RotaryEmbedding", make_rotary_embedding},
                                               {"ArgMax", make_argmax}}};

const Operator* find(std::string_view op_type) {
  const auto* found =
      std::ranges::find_if(kOperators, [&](const Operator& one) { return one.op_type == op_type; });
  return found == kOperators.end() ? nullptr : found;
}

}  // namespace

GpuDevice::GpuDevice(const DeviceOptions& options)
    : options_(options),
      context_(std::make_shared<Context>(choose_device(options.opencl_device))),
      host_(make_cpu_device(options)) {}

std::string GpuDevice::description() const {
  const DeviceFacts& facts = context_->facts();
  return "gpu (" + facts.title() + ", driver " + facts.driver + ")";
}

std::string GpuDevice::warning() const { return context_->facts().warning(); }

std::string GpuDevice::unsupported(const Node& node, const Producer& /*producer*/) const {
  try {
    prepare(node);
    return "";
  } catch (const Error& error) {
    return error.what();
  }
}

std::string GpuDevice::unsupported_in_file(const Node& node, const Producer& producer) const {
  if (find(node.op_type) == nullptr) return unsupported(node, producer);
  return host_->unsupported_in_file(node, producer);
}

std::unique_ptr<Step> GpuDevice::prepare(const Node& node) const {
  const Operator* found = find(node.op_type);
  if (found == nullptr) {
    std::string names;
    for (const Operator& one : kOperators)
      names += (names.empty() ? "" : ", ") + std::string(one.op_type);
    fail("[", to_string(node), "] expected one of the operators of device 'gpu': ", names,
         "; use device = cpu");
  }
  return found->make(node, {.context = context_,
                            .host = host_->prepare(node),
                            .activations = options_.activations,
                            .host_context = cpu::make_context(options_)});
}

std::vector<Contract> GpuDevice::contracts() const {
  std::vector<Contract> taken = host_->contracts();
  std::erase_if(taken, [](const Contract& one) { return find(one.op_type) == nullptr; });
  return taken;
}

}  // namespace gpu

std::unique_ptr<Device> make_gpu_operators(const DeviceOptions& options) {
  return std::make_unique<gpu::GpuDevice>(options);
}

}  // namespace flownpu
