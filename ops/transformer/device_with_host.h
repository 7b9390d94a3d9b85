// SPDX-License-Identifier: Apache-2.0
// A device that fuses a model's layers into one node, which it computes, and gives all other nodes
// to its host, an inner CPU device.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "ops/device.h"
#include "ops/transformer/cache/kv_caches.h"

namespace flownpu::transformer {

class DeviceWithHost : public Device {
 public:
  std::string unsupported_in_file(const Node& node, const Producer& producer) const override {
    return host_->unsupported_in_file(node, producer);
  }
  std::vector<Contract> contracts() const override { return host_->contracts(); }
  // First the host lowers exported operators to FlowNPU's, then lower_own() makes this device's own
  // nodes of them. An obstacle in the graph, or an Error of describe(), leaves all nodes to the
  // host.
  Lowered lower(std::vector<Node> nodes, const Lowering& lowering) const override;
  std::int64_t tokens_at_once(std::int64_t batch) const override {
    return host_->tokens_at_once(batch);
  }
  Memory allocate(std::size_t bytes) const override { return host_->allocate(bytes); }
  void wait() const override { host_->wait(); }

  // The KV caches of the decoder that was prepared last; null if there is none.
  std::shared_ptr<KvCaches> newest_caches() const { return caches_.newest(); }

 protected:
  explicit DeviceWithHost(const DeviceOptions& options)
      : options_(options), host_(make_cpu_device(options)) {}

  // Whether this device computes the node itself: layers as one node, or a single operator.
  virtual bool is_own(const Node& node) const = 0;
  // Replaces nodes by this device's own. `outputs`: names of the values that leave the partition.
  // If no node is for this device, returns the nodes unchanged, with the reasons in
  // Lowered::on_host.
  virtual Lowered lower_own(std::vector<Node> nodes,
                            const std::vector<std::string>& outputs) const = 0;
  // The device's text about its own nodes, for the placement summary. Throws Error if it cannot
  // compute them.
  virtual std::string describe(const std::vector<Node>& nodes,
                               const std::string& model_folder) const = 0;
  // The operators that the device would compute as a part of layers, all with one reason against
  // it.
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

}  // namespace flownpu::transformer
