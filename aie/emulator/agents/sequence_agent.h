// SPDX-License-Identifier: Apache-2.0
// The controller: runs the steps of one call.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "aie/emulator/agents/channel.h"

namespace flownpu::emulator {

class SequenceAgent final : public Agent {
 public:
  // `buffers`: the host buffers, in the sequence's order and of its sizes. Throws Error if a
  // transfer leaves its buffer or is on no shim channel, or a step names what the array has not.
  SequenceAgent(const Sequence& sequence, std::span<const std::span<std::byte>> buffers,
                const Array& array, std::vector<std::unique_ptr<Channel>>& channels,
                std::vector<std::unique_ptr<Lock>>& locks, Memories& memories,
                Scheduler& scheduler);

  bool step() override;
  [[nodiscard]] std::string name() const override;
  [[nodiscard]] Wait wait() const override;
  [[nodiscard]] bool ended() const { return at_ == sequence_->steps.size(); }
  // Throws Error if a transfer is still under way.
  void check_complete() const;

 private:
  bool run_one();
  [[nodiscard]] const HostAction& current() const { return sequence_->steps[at_]; }
  [[nodiscard]] Channel& channel_of(std::size_t transfer) const {
    return *(*channels_)[sequence_->transfers[transfer].channel];
  }

  const Sequence* sequence_;
  const Array* array_;
  std::vector<std::unique_ptr<Channel>>* channels_;
  std::vector<std::unique_ptr<Lock>>* locks_;
  Memories* memories_;
  Scheduler* scheduler_;
  std::vector<Task> tasks_;
  std::vector<bool> started_;
  std::size_t at_ = 0;
};

}  // namespace flownpu::emulator
