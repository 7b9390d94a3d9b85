// SPDX-License-Identifier: Apache-2.0
// The devices `npu` and `emulate`: the layers of a decoder, or of an encoder of images, and
// products and attention outside of these, run on the array, or on the emulator by the same path;
// other nodes run on the host, an inner cpu device.
#pragma once

#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "ops/layers/device_with_host.h"
#include "ops/npu/artifacts/compiled_designs.h"
#include "ops/npu/match/layers.h"
#include "ops/npu/operators/programs.h"

namespace flownpu {

// Whether make_npu_device() can drive an NPU in this build; if not, none is offered to ONNX
// Runtime.
bool npu_built_in();

namespace npu {

class NpuDevice final : public layers::DeviceWithHost {
 public:
  // Artifacts and runtime are opened when nodes are lowered or prepared.
  NpuDevice(const DeviceOptions& options, bool emulated);

  std::string_view name() const override { return emulated_ ? "emulate" : "npu"; }
  std::string description() const override;
  std::string warning() const override;
  std::string unsupported(const Node& node, const Producer& producer) const override;
  std::string obstacle(std::vector<Judged> graph,
                       const std::vector<std::string>& outputs) const override {
    return obstacle_of_layers(std::move(graph), outputs);
  }
  std::unique_ptr<Step> prepare(const Node& node) const override;
  // Operators by themselves, too. Where the artifacts, the device, or a call are missing, all that
  // is for the array is left on the host, with what was said of it as the reason.
  Lowered lower(std::vector<Node> nodes, const Lowering& lowering) const override;
  std::string compatibility(const Lowering& lowering) const override;
  // Throws Error for a tensor that stands for a KV cache that is gone.
  void restore(std::span<const Tensor> tensors) const override { caches().restore(tensors); }

  // What the array was sent so far; zeros before it was opened.
  npu::Counts counts() const;

 private:
  // Throws DeviceError.
  std::shared_ptr<CompiledDesigns> open(const std::string& model_folder) const;
  std::string folder(const std::string& model_folder) const;

  // A decoder's or an encoder's.
  bool is_own(const Node& node) const override { return is_layers(node); }
  Lowered lower_own(std::vector<Node> nodes,
                    const std::vector<std::string>& outputs) const override {
    return lower_layers(std::move(nodes), outputs);
  }
  std::string describe(const std::vector<Node>& nodes,
                       const std::string& model_folder) const override;
  std::vector<Lowered::OnHost> left_on_host(const std::vector<Node>& nodes,
                                            const std::string& reason) const override {
    return npu::left_on_host(nodes, reason);
  }

  std::unique_ptr<Step> prepare_operator(const Node& node,
                                         const std::shared_ptr<CompiledDesigns>& designs) const;
  std::int64_t threshold() const;

  bool emulated_;
  HostCompute host_compute_;  // of the same kernels and threads
  // Buffers of steps that are operators by themselves.
  std::shared_ptr<SharedBuffers> shared_ = std::make_shared<SharedBuffers>();
  mutable std::mutex mutex_;  // for what follows
  mutable std::shared_ptr<CompiledDesigns> designs_;
};

}  // namespace npu
}  // namespace flownpu
