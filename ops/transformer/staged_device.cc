// SPDX-License-Identifier: Apache-2.0
#include "ops/transformer/staged_device.h"

#include <algorithm>
#include <utility>

#include "ops/transformer/decoder.h"
#include "ops/transformer/decoder_call.h"

namespace flownpu::transformer {
namespace {

// Each tensor's view of one sequence.
std::vector<Tensor> sequences_of(std::span<const Tensor> tensors, std::int64_t sequence) {
  std::vector<Tensor> views;
  views.reserve(tensors.size());
  for (const Tensor& tensor : tensors) views.push_back(sequence_of(tensor, sequence));
  return views;
}

// The step of a decoder's layers on the device of its own.
class StagedStep final : public Step {
 public:
  StagedStep(const Node& node, const StagedDevice& device, std::unique_ptr<Step> step,
             std::shared_ptr<KvCaches> caches)
      : decoder_(Decoder::read(node)),
        device_(device),
        step_(std::move(step)),
        caches_(std::move(caches)) {}

  void infer(std::span<const Tensor> inputs, std::span<Shape> outputs) const override {
    check_call(decoder_, inputs);
    const std::int64_t batch = inputs[kHidden].shape[0];
    std::vector<OtherStage::Loan> loans;
    std::int64_t most = 0;
    for (std::int64_t sequence = 0; sequence < batch; ++sequence) {
      const SequenceTokens tokens = tokens_of(decoder_, inputs, sequence);
      loans.push_back({nullptr, tokens.past, tokens.total()});
      most = std::max(most, tokens.count);
    }
    if (device_.is_others(most)) leave(inputs, std::move(loans));
    step_->infer(inputs, outputs);
  }
  std::size_t scratch_bytes(std::span<const Tensor> inputs) const override {
    return step_->scratch_bytes(inputs);
  }
  void run(std::span<const Tensor> inputs, std::span<const Tensor> outputs,
           std::span<std::byte> scratch) const override {
    step_->run(inputs, outputs, scratch);
  }
  std::int64_t multiply_adds() const override { return step_->multiply_adds(); }

 private:
  [[noreturn]] void leave(std::span<const Tensor> inputs,
                          std::vector<OtherStage::Loan> loans) const {
    const auto pasts = inputs.subspan(kFirstPast, 2 * decoder_.attentions());
    if (caches_ != nullptr) {
      std::vector<Tensor> firsts;
      firsts.reserve(loans.size());
      for (std::size_t i = 0; i < loans.size(); ++i)
        firsts.push_back(sequence_of(pasts.front(), static_cast<std::int64_t>(i)));
      const auto held = caches_->hold(firsts);
      for (std::size_t i = 0; i < loans.size(); ++i)
        loans[i].cache =
            caches_->lend(sequences_of(pasts, static_cast<std::int64_t>(i)), loans[i].past);
    }
    // It is no failure: what handles failures must not see it.
    // NOLINTNEXTLINE(bugprone-std-exception-baseclass)
    throw OtherStage(caches_, std::move(loans), pasts.front().type);
  }

  Decoder decoder_;
  const StagedDevice& device_;
  std::unique_ptr<Step> step_;
  std::shared_ptr<KvCaches> caches_;  // null: the other device shares them
};

}  // namespace

void OtherStage::finish(std::vector<Tensor> presents) const {
  for (Tensor& present : presents) present.type = type_;
  for (std::size_t i = 0; i < loans_.size(); ++i)
    caches_->take_back(loans_[i].cache, sequences_of(presents, static_cast<std::int64_t>(i)),
                       loans_[i].past, loans_[i].total);
}

StagedDevice::StagedDevice(std::unique_ptr<Device> own, std::shared_ptr<const Device> other,
                           bool own_prompts, std::int64_t threshold)
    : own_(std::move(own)),
      other_(std::move(other)),
      own_caches_(dynamic_cast<const DeviceWithHost*>(own_.get())),
      other_caches_(dynamic_cast<const DeviceWithHost*>(other_.get())),
      own_prompts_(own_prompts),
      threshold_(threshold) {
  const Device& prompts = own_prompts_ ? *own_ : *other_;
  const Device& tokens = own_prompts_ ? *other_ : *own_;
  name_.append(prompts.name()).append("+").append(tokens.name());
}

std::string StagedDevice::description() const {
  const Device& prompts = own_prompts_ ? *own_ : *other_;
  const Device& tokens = own_prompts_ ? *other_ : *own_;
  return prompts.description() + " for " + std::to_string(threshold_) +
         " and more new tokens, and " + tokens.description() + " for fewer";
}

std::unique_ptr<Step> StagedDevice::prepare(const Node& node) const {
  const auto before = own_caches_->newest_caches();
  std::unique_ptr<Step> step = own_->prepare(node);
  std::shared_ptr<KvCaches> caches = own_caches_->newest_caches();
  if (caches == before) return step;
  if (other_caches_ != nullptr) caches = nullptr;
  return std::make_unique<StagedStep>(node, *this, std::move(step), std::move(caches));
}

void StagedDevice::share_caches() const {
  if (other_caches_ != nullptr)
    other_caches_->newest_caches()->share(*own_caches_->newest_caches());
}

}  // namespace flownpu::transformer
