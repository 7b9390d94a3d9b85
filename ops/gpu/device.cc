// SPDX-License-Identifier: Apache-2.0
#include "ops/gpu/device.h"

#include <algorithm>

#include "ops/error.h"
#include "ops/gpu/open_context.h"
#include "ops/gpu/operators/step.h"

namespace flownpu {
namespace gpu {
GpuDevice::GpuDevice(const DeviceOptions& options)
    : options_(options), context_(open_context(options)), host_(make_cpu_device(options)) {}

std::shared_ptr<Context> GpuDevice::context() const {
  const std::lock_guard lock(mutex_);
  return context_;
}

std::shared_ptr<Context> GpuDevice::open() const {
  const std::lock_guard lock(mutex_);
  if (context_->failed()) context_ = open_context(options_);
  return context_;
}

std::string GpuDevice::description() const {
  const DeviceFacts facts = context()->facts();
  return "gpu (" + facts.title() + ", driver " + facts.driver + ")";
}

std::string GpuDevice::warning() const { return context()->facts().warning(); }

std::string GpuDevice::unsupported(const Node& node, const Producer& /*producer*/) const {
  try {
    prepare(node);
    return "";
  } catch (const Error& error) {
    return error.what();
  }
}

std::string GpuDevice::unsupported_in_file(const Node& node, const Producer& producer) const {
  if (find_operator(node.domain, node.op_type) == nullptr) return unsupported(node, producer);
  return host_->unsupported_in_file(node, producer);
}

std::unique_ptr<Step> GpuDevice::prepare(const Node& node) const {
  const Operator* found = find_operator(node.domain, node.op_type);
  if (found == nullptr) {
    std::string names;
    for (const Operator& one : operators())
      names += (names.empty() ? "" : ", ") + std::string(one.op_type);
    fail("[", to_string(node), "] expected one of the operators of device 'gpu': ", names,
         "; use device = cpu");
  }
  if (const std::string reason = found->refused(node); !reason.empty())
    fail("[", to_string(node), "] ", reason, ": use device = cpu");
  return found->make(node, {.context = open(),
                            .host = host_->prepare(node),
                            .activations = options_.activations,
                            .weights = options_.gpu_weights,
                            .matrices = options_.gpu_matrices,
                            .winograd = options_.gpu_winograd,
                            .host_context = cpu::make_context(options_)});
}

std::vector<Contract> GpuDevice::contracts() const {
  std::vector<Contract> taken = host_->contracts();
  std::erase_if(
      taken, [](const Contract& one) { return find_operator(one.domain, one.op_type) == nullptr; });
  return taken;
}

}  // namespace gpu

std::unique_ptr<Device> make_gpu_operators(const DeviceOptions& options) {
  return std::make_unique<gpu::GpuDevice>(options);
}

}  // namespace flownpu
