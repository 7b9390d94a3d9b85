// SPDX-License-Identifier: Apache-2.0
// The device `gpu` of a session. An OpenCL device runs the layers of a decoder, or the operators of
// a graph without a KV cache; other nodes run on the host, an inner cpu device.
#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "ops/gpu/context/context.h"
#include "ops/gpu/decoder/paged_caches.h"
#include "ops/transformer/device_with_host.h"

namespace flownpu::gpu {

class SessionDevice final : public transformer::DeviceWithHost {
 public:
  // OpenCL is looked for when nodes are lowered or prepared.
  explicit SessionDevice(const DeviceOptions& options) : DeviceWithHost(options) {}

  std::string_view name() const override { return "gpu"; }
  std::string description() const override;
  std::string warning() const override;
  std::string absent() const override;
  std::string unsupported(const Node& node, const Producer& producer) const override;
  std::unique_ptr<Step> prepare(const Node& node) const override;
  // The host's memory, with a twin on the device if that is open.
  Memory allocate(std::size_t bytes) const override;
  std::string compatibility(const Lowering& lowering) const override;
  // Software reads weights where the file is mapped.
  bool copies_weights() const override;
  // Throws Error for a tensor that stands for a KV cache that is gone.
  void restore(std::span<const Tensor> tensors) const override;

  // The OpenCL device's counts so far; nothing if none was opened.
  std::optional<Counts> counts() const;

 private:
  // Opens the device unless it is open. Throws GpuError.
  std::shared_ptr<Context> open() const;
  // Null if the device is not open.
  std::shared_ptr<Context> opened() const;
  std::string describe(const std::vector<Node>& nodes) const;

  bool is_own(const Node& node) const override;
  Lowered lower_own(std::vector<Node> nodes,
                    const std::vector<std::string>& outputs) const override;
  std::string describe(const std::vector<Node>& nodes,
                       const std::string& model_folder) const override;
  std::vector<Lowered::OnHost> left_on_host(const std::vector<Node>& nodes,
                                            const std::string& reason) const override;

  mutable std::mutex mutex_;  // guards context_
  mutable std::shared_ptr<Context> context_;
  // Those of prepared steps; guarded by the context's mutex.
  mutable std::vector<std::weak_ptr<PagedCaches>> paged_;
};

}  // namespace flownpu::gpu
