// SPDX-License-Identifier: Apache-2.0
#include "aie/emulator/emulator.h"

#include <array>
#include <cstring>
#include <utility>

namespace flownpu::emulator {

FindKernel kernels_of(const aie_host::KernelTable& table) {
  return [&table](const KernelRecord& record) -> KernelCall {
    for (std::size_t i = 0; i < table.kernel_count; ++i) {
      const aie_host::Kernel& kernel = table.kernels[i];
      if (record.entry != kernel.name) continue;
      bool same = kernel.parameter_count == record.arguments.size();
      for (std::size_t p = 0; same && p < kernel.parameter_count; ++p) {
        same = kernel.parameters[p].is_buffer == (record.arguments[p] > 0) &&
               record.arguments[p] % kernel.parameters[p].element_bytes == 0;
      }
      if (!same) throw Error("[emulator] kernel " + record.entry + " has other parameters");
      return [call = kernel.call](std::span<const aie_host::Argument> arguments) {
        std::array<char, 512> error{};
        if (!call(arguments.data(), error.data(), error.size())) throw Error(error.data());
      };
    }
    throw Error("[emulator] there is no kernel " + record.entry + " for " + table.architecture);
  };
}

Emulator::Emulator(Array array, const FindKernel& find_kernel)
    : array_(std::move(array)), memories_(array_.memories), streams_(array_.streams) {
  scheduler_.reserve(array_.channels.size() + array_.cores.size() + 1);
  for (const LockRecord& record : array_.locks) {
    locks_.push_back(std::make_unique<Lock>(record, scheduler_));
  }
  for (const KernelRecord& record : array_.kernels) {
    kernels_.push_back({&record, find_kernel(record), {}});
  }
  for (const ChannelRecord& record : array_.channels) {
    channels_.push_back(
        std::make_unique<Channel>(record, streams_[record.stream], locks_, memories_, scheduler_));
    if (!channels_.back()->of_shim()) scheduler_.wake(*channels_.back());
  }
  for (const CoreRecord& record : array_.cores) {
    cores_.push_back(
        std::make_unique<Core>(record, array_, locks_, memories_, kernels_, scheduler_));
    scheduler_.wake(*cores_.back());
  }
}

void Emulator::check(const Sequence& sequence,
                     std::span<const std::span<std::byte>> buffers) const {
  if (failed_) throw Error("[emulator] a call before this one failed: make a new emulator");
  if (sequence.identity != array_.identity) {
    throw Error("[emulator] sequence " + sequence.name + " is for another array");
  }
  if (buffers.size() != sequence.buffers.size()) {
    throw Error("[emulator] sequence " + sequence.name + " has " +
                std::to_string(sequence.buffers.size()) + " host buffers, got " +
                std::to_string(buffers.size()));
  }
  for (std::size_t i = 0; i < buffers.size(); ++i) {
    if (buffers[i].size() != sequence.buffers[i].bytes) {
      throw Error("[emulator] expected host buffer " + sequence.buffers[i].name + " of " +
                  std::to_string(sequence.buffers[i].bytes) + " bytes, got " +
                  std::to_string(buffers[i].size()));
    }
  }
}

// Null if the name is empty.
const Agent* Emulator::find(std::string_view name) const {
  if (name.empty()) return nullptr;
  for (const auto& core : cores_) {
    if (core->name() == name) return core.get();
  }
  for (const auto& channel : channels_) {
    if (channel->name() == name) return channel.get();
  }
  throw Error("[emulator] expected the name of a core or a channel, got " + std::string(name));
}

void Emulator::run(const Sequence& sequence, std::span<const std::span<std::byte>> buffers,
                   const RunOptions& options) {
  check(sequence, buffers);
  const Agent* const last = find(options.last);
  failed_ = true;  // until the call has ended well
  if (sequence_ != nullptr) {
    scheduler_.forget(*sequence_);
    for (const auto& lock : locks_) lock->forget(*sequence_);
  }
  sequence_ = std::make_unique<SequenceAgent>(sequence, buffers, array_, channels_, locks_,
                                              memories_, scheduler_);
  scheduler_.start(options.seed, last);
  scheduler_.wake(*sequence_);
  while (!sequence_->ended() || options.settle) {
    if (scheduler_.run_one()) continue;
    if (!sequence_->ended()) throw Deadlock(describe_deadlock(*sequence_));
    break;
  }
  sequence_->check_complete();
  for (const auto& channel : channels_) {
    if (channel->of_shim()) channel->finish_task();
  }
  failed_ = false;
}

Counts Emulator::counts() const {
  constexpr std::uint64_t kWord = 4;
  Counts counts;
  for (const auto& channel : channels_) counts.words[channel->name()] = channel->moved() / kWord;
  for (const Kernel& kernel : kernels_) counts.calls[kernel.record->entry] = kernel.calls;
  return counts;
}

void Emulator::reset_counts() {
  for (const auto& channel : channels_) channel->forget_moved();
  for (Kernel& kernel : kernels_) kernel.calls = 0;
}

std::vector<std::string> Emulator::leftovers() const {
  std::vector<std::string> found;
  found.reserve(channels_.size() + cores_.size());
  for (const auto& channel : channels_) found.push_back(channel->leftover());
  for (const auto& core : cores_) found.push_back(core->leftover());
  for (std::size_t i = 0; i < array_.ends.size(); ++i) {
    const EndRecord& end = array_.ends[i];
    const Lock& lock = *locks_[end.takes];
    if (end.consumes && lock.value() > 0) {
      found.push_back(std::to_string(lock.value()) + " of the " + lock.name() + " wait for a core");
    }
  }
  std::erase(found, "");
  return found;
}

}  // namespace flownpu::emulator
