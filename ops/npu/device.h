// SPDX-License-Identifier: Apache-2.0
// The devices `npu` and `emulate`. Their array is an NPU or the emulator; all else is the same. The
// array runs the layers of a decoder or of an encoder of images, and products and attention outside
// of these; other nodes run on the host, an inner cpu device.
#pragma once

#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "ops/npu/artifacts/compiled_designs.h"
#include "ops/npu/match/layers.h"
#include "ops/npu/operators/programs.h"
#include "ops/transformer/device_with_host.h"

namespace flownpu {

// Whether make_npu_device() can drive an NPU in this build; if not, ONNX Runtime is offered none.
bool npu_built_in();

namespace npu {

// The beginning of Device::compatibility(): the device, and the layout of lowered nodes' constants.
std::string compatible_layout(std::string_view device);

class NpuDevice final : public transformer::DeviceWithHost {
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
  // Lowers layers, then operators by themselves. If artifacts, the device or a call are missing,
  // the host keeps all of the array's nodes, with the error's text as the reason.
  Lowered lower(std::vector<Node> nodes, const Lowering& lowering) const override;
  std::string compatibility(const Lowering& lowering) const override;
  bool copies_weights() const override { return true; }
  // Throws Error for a tensor that stands for a KV cache that is gone.
  void restore(std::span<const Tensor> tensors) const override { caches().restore(tensors); }

  // The calls and bytes sent to the array so far; zeros before it is opened.
  npu::Counts counts() const;

 private:
  // Opens the artifacts and the runtime, unless they are open. Throws DeviceError.
  std::shared_ptr<CompiledDesigns> open(const std::string& model_folder) const;
  std::string folder(const std::string& model_folder) const;

  // Whether the node is the layers of a decoder or of an encoder.
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
  Threshold threshold() const;

  bool emulated_;
  HostCompute host_compute_;  // the host's kernels and threads
  // Buffers that the steps of operators by themselves share.
  std::shared_ptr<SharedBuffers> shared_ = std::make_shared<SharedBuffers>();
  mutable std::mutex mutex_;  // guards designs_
  mutable std::shared_ptr<CompiledDesigns> designs_;
};

}  // namespace npu
}  // namespace flownpu
