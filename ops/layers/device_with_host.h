// SPDX-License-Identifier: Apache-2.0
// A device that makes one node of a model's layers, which it computes, and gives other nodes to an
// inner cpu device, its host.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "ops/device.h"
#include "ops/layers/kv_caches.h"

namespace flownpu::layers {

class DeviceWithHost : public Device {
 public:
  std::string unsupported_in_file(const Node& node, const Producer& producer) const override {
    return host_->unsupported_in_file(node, producer);
  }
  std::vector<Contract> contracts() const override { return host_->contracts(); }
  // Exported operators become ours first, then this device's own. What is in the way, an obstacle
  // in the graph or an Error of lower_own() or describe(), leaves all of them on the host.
  Lowered lower(std::vector<Node> nodes, const Lowering& lowering) const override;
  std::int64_t tokens_at_once(std::int64_t batch) const override {
    return host_->tokens_at_once(batch);
  }
  Memory allocate(std::size_t bytes) const override { return host_->allocate(bytes); }
  void wait() const override { host_->wait(); }

 protected:
  explicit DeviceWithHost(const DeviceOptions& options)
      : options_(options), host_(make_cpu_device(options)) {}

  // Whether this device computes the node: layers as one node, or an operator for it alone.
  virtual bool is_own(const Node& node) const = 0;
  // The nodes with what this device computes as nodes of its own; `outputs`: names of the values
  // that leave the partition. Where there is nothing for it, the nodes as they are, and why.
  virtual Lowered lower_own(std::vector<Node> nodes,
                            const std::vector<std::string>& outputs) const = 0;
  // Says for the placement line how those nodes are computed that are its own. Throws Error if the
  // device does not compute them.
  virtual std::string describe(const std::vector<Node>& nodes,
                               const std::string& model_folder) const = 0;
  // The operators that it would compute as a part of layers, with one reason why it does not.
  virtual std::vector<Lowered::OnHost> left_on_host(const std::vector<Node>& nodes,
                                                    const std::string& reason) const = 0;

  const DeviceOptions& options() const { return options_; }
  const Device& host() const { return *host_; }
  CachesOfSteps& caches() const { return caches_; }

 private:
  DeviceOptions options_;
  std::unique_ptr<Device> host_;
  mutable CachesOfSteps caches_;
};

}  // namespace flownpu::layers
