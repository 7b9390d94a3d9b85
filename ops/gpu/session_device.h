// SPDX-License-Identifier: Apache-2.0
// The device `gpu` of a session: the layers of a decoder, or the products and attention of a graph
// without a KV cache, run on an OpenCL device, other nodes on the host, an inner cpu device.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "ops/device.h"
#include "ops/gpu/opencl/context.h"
#include "ops/layers/kv_caches.h"

namespace flownpu::gpu {

class SessionDevice final : public Device {
 public:
  // OpenCL is looked for when nodes are lowered or prepared.
  explicit SessionDevice(const DeviceOptions& options);

  std::string_view name() const override { return "gpu"; }
  std::string description() const override;
  std::string warning() const override;
  std::string unsupported(const Node& node, const Producer& producer) const override;
  std::string unsupported_in_file(const Node& node, const Producer& producer) const override {
    return host_->unsupported_in_file(node, producer);
  }
  std::unique_ptr<Step> prepare(const Node& node) const override;
  std::vector<Contract> contracts() const override { return host_->contracts(); }
  // Where there is no OpenCL device, or no decoder that it computes, all that is for it is left on
  // the host, with the reason.
  Lowered lower(std::vector<Node> nodes, const Lowering& lowering) const override;
  std::string compatibility(const Lowering& lowering) const override;
  // Throws Error for a tensor that stands for a KV cache that is gone.
  void restore(std::span<const Tensor> tensors) const override;
  std::int64_t tokens_at_once(std::int64_t batch) const override {
    return host_->tokens_at_once(batch);
  }
  Memory allocate(std::size_t bytes) const override { return host_->allocate(bytes); }
  void wait() const override { host_->wait(); }

  // What the device was given to do so far; nothing before it was opened.
  std::optional<Counts> counts() const;

 private:
  // Throws OpenClError.
  std::shared_ptr<Context> open() const;
  std::shared_ptr<Context> opened() const;
  std::string describe(const std::vector<Node>& nodes) const;

  DeviceOptions options_;
  std::unique_ptr<Device> host_;
  mutable layers::CachesOfSteps caches_;
  mutable std::mutex mutex_;  // for what follows
  mutable std::shared_ptr<Context> context_;
};

}  // namespace flownpu::gpu
