// SPDX-License-Identifier: Apache-2.0
// The device `gpu` for single operators, on an OpenCL device. An inner cpu device, the host, checks
// nodes and infers shapes. It computes only the steps before attention (operators/attention.cc).
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "ops/device.h"
#include "ops/gpu/context/context.h"

namespace flownpu::gpu {

class GpuDevice final : public Device {
 public:
  // Throws GpuError where there is no loader, no platform or no such device.
  explicit GpuDevice(const DeviceOptions& options);

  std::string_view name() const override { return "gpu"; }
  std::string description() const override;
  std::string warning() const override;
  std::string unsupported(const Node& node, const Producer& producer) const override;
  std::string unsupported_in_file(const Node& node, const Producer& producer) const override;
  std::unique_ptr<Step> prepare(const Node& node) const override;
  // Contracts of the operators that this device computes.
  std::vector<Contract> contracts() const override;
  Memory allocate(std::size_t bytes) const override { return host_->allocate(bytes); }
  void wait() const override {}

  // The context that was opened last. After a failure of the device, nodes are prepared for a new
  // context.
  std::shared_ptr<Context> context() const;

 private:
  std::shared_ptr<Context> open() const;

  DeviceOptions options_;
  mutable std::mutex mutex_;  // guards context_
  mutable std::shared_ptr<Context> context_;
  std::unique_ptr<Device> host_;
};

}  // namespace flownpu::gpu

namespace flownpu {

// A GpuDevice. Throws GpuError, as its constructor does.
std::unique_ptr<Device> make_gpu_operators(const DeviceOptions& options);

}  // namespace flownpu
