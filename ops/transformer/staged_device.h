// SPDX-License-Identifier: Apache-2.0
// StagedDevice: two devices that compute one conversation by turns: prompts on one, single tokens
// on the other.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "ops/transformer/device_with_host.h"

namespace flownpu::transformer {

// Thrown by a decoder's step in infer() for a run that the other device computes. It is no failure,
// and so no std::exception.
class OtherStage {
 public:
  struct Loan {
    std::shared_ptr<KvCache> cache;
    std::int64_t past = 0;
    std::int64_t total = 0;
  };

  OtherStage(std::shared_ptr<KvCaches> caches, std::vector<Loan> loans, DataType type)
      : caches_(std::move(caches)), loans_(std::move(loans)), type_(type) {}

  // To be called when the other device's run has succeeded. `presents`: key and value of each
  // layer, of which data and shape are read.
  void finish(std::vector<Tensor> presents) const;

 private:
  // Null: the devices share their caches.
  std::shared_ptr<KvCaches> caches_;
  std::vector<Loan> loans_;  // by sequence
  DataType type_;            // of keys and values
};

// Behaves like the one device, which keeps KV caches in its own memory, but its decoder's step
// leaves runs of the other stage: those of `threshold` and more new tokens in a sequence, or those
// of fewer. A run is prepared for the other device before it is left: if that is the CPU, it finds
// the keys and values in the caller's tensors.
class StagedDevice final : public Device {
 public:
  // `own` is a DeviceWithHost; if `other` is one as well, share_caches() must be called after each
  // decoder was prepared on both. `own_prompts`: whether `own` computes the prompts.
  StagedDevice(std::unique_ptr<Device> own, std::shared_ptr<const Device> other, bool own_prompts,
               std::int64_t threshold);

  const Device& own() const { return *own_; }
  const std::shared_ptr<const Device>& other() const { return other_; }
  // How many of the two make a copy of the weights.
  std::size_t weight_copies() const {
    return std::size_t{own_->copies_weights()} + std::size_t{other_->copies_weights()};
  }
  // Whether the other device is the CPU, which keeps keys and values in the caller's tensors.
  bool other_is_host() const { return other_caches_ == nullptr; }
  // Makes the conversations of the decoders that both devices prepared last the same.
  void share_caches() const;
  // From now on this device leaves no run.
  void lose_other() const { alone_ = true; }

  std::string_view name() const override { return name_; }
  std::string description() const override;
  std::string warning() const override { return own_->warning(); }
  std::string unsupported(const Node& node, const Producer& producer) const override {
    return own_->unsupported(node, producer);
  }
  std::string unsupported_in_file(const Node& node, const Producer& producer) const override {
    return own_->unsupported_in_file(node, producer);
  }
  std::string obstacle(std::vector<Judged> graph,
                       const std::vector<std::string>& outputs) const override {
    return own_->obstacle(std::move(graph), outputs);
  }
  std::unique_ptr<Step> prepare(const Node& node) const override;
  std::vector<Contract> contracts() const override { return own_->contracts(); }
  Lowered lower(std::vector<Node> nodes, const Lowering& lowering) const override {
    return own_->lower(std::move(nodes), lowering);
  }
  std::string compatibility(const Lowering& lowering) const override {
    return own_->compatibility(lowering);
  }
  void restore(std::span<const Tensor> tensors) const override { own_->restore(tensors); }
  std::int64_t tokens_at_once(std::int64_t batch) const override {
    return own_->tokens_at_once(batch);
  }
  void expect(std::span<const std::span<const std::byte>> streams) const override {
    own_->expect(streams);
  }
  Memory allocate(std::size_t bytes) const override { return own_->allocate(bytes); }
  void wait() const override { own_->wait(); }

  // Whether the other device computes a run of that many new tokens.
  bool is_others(std::int64_t tokens) const {
    return !alone_ && (tokens >= threshold_) != own_prompts_;
  }

 private:
  std::unique_ptr<Device> own_;
  std::shared_ptr<const Device> other_;
  // As DeviceWithHost; null: the other is the CPU.
  const DeviceWithHost* own_caches_;
  const DeviceWithHost* other_caches_;
  bool own_prompts_;
  std::int64_t threshold_;
  std::string name_;
  mutable std::atomic<bool> alone_ = false;
};

}  // namespace flownpu::transformer
