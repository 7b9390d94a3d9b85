// SPDX-License-Identifier: Apache-2.0
#include "aie/emulator/agents/sequence_agent.h"

namespace flownpu::emulator {

SequenceAgent::SequenceAgent(const Sequence& sequence,
                             std::span<const std::span<std::byte>> buffers, const Array& array,
                             std::vector<std::unique_ptr<Channel>>& channels,
                             std::vector<std::unique_ptr<Lock>>& locks, Memories& memories,
                             Scheduler& scheduler)
    : sequence_(&sequence),
      array_(&array),
      channels_(&channels),
      locks_(&locks),
      memories_(&memories),
      scheduler_(&scheduler),
      started_(sequence.transfers.size()) {
  for (const Transfer& transfer : sequence.transfers) {
    const std::size_t end = transfer.offset + transfer.walk.end();
    const HostBuffer& buffer = sequence.buffers[transfer.buffer];
    if (end > buffer.bytes) {
      throw Error("[emulator] transfer " + transfer.name + " reaches byte " + std::to_string(end) +
                  " of host buffer " + buffer.name + ", which has " + std::to_string(buffer.bytes));
    }
    if (transfer.channel >= channels.size() || !channels[transfer.channel]->of_shim()) {
      throw Error("[emulator] transfer " + transfer.name + " is on no channel of a shim tile");
    }
    tasks_.push_back({&transfer, buffers[transfer.buffer].data() + transfer.offset});
  }
  for (const auto& channel : channels) channel->belongs_to(*this);
  for (const HostAction& step : sequence.steps) {
    if ((step.kind == HostActionKind::kWrite && step.what >= array.memories.size()) ||
        (step.kind == HostActionKind::kSet && step.what >= array.locks.size())) {
      throw Error("[emulator] sequence " + sequence.name + " names what the array does not have");
    }
    if (step.kind == HostActionKind::kSet) locks[step.what]->given_by(*this);
  }
}

bool SequenceAgent::step() {
  do {
    if (ended() || !run_one()) return false;
  } while (!scheduler_->seeded());
  return !ended();
}

bool SequenceAgent::run_one() {
  const HostAction& step = current();
  switch (step.kind) {
    case HostActionKind::kTransfer: {
      Channel& channel = channel_of(step.what);
      if (channel.queued() == array_->task_queue) return false;
      channel.queue(tasks_[step.what]);
      started_[step.what] = true;
      break;
    }
    case HostActionKind::kAwait:
      if (!tasks_[step.what].transfer->token) {
        throw Error("[emulator] " + name() + " awaits a transfer that reports no end");
      }
      if (!tasks_[step.what].done) return false;
      break;
    case HostActionKind::kFree:
      if (!tasks_[step.what].complete) {
        throw Error("[emulator] " + name() + " frees a descriptor that " +
                    channel_of(step.what).name() + " still uses");
      }
      break;
    case HostActionKind::kWrite:
      memories_->store(step.what, static_cast<std::int64_t>(step.index), step.value);
      break;
    case HostActionKind::kSet:
      (*locks_)[step.what]->set(step.value);
      break;
  }
  ++at_;
  return true;
}

std::string SequenceAgent::name() const {
  std::string text = "sequence " + sequence_->name;
  if (ended()) return text;
  text += ", step " + std::to_string(at_) + " of " + std::to_string(sequence_->steps.size());
  switch (current().kind) {
    case HostActionKind::kTransfer:
      return text + " (start " + sequence_->transfers[current().what].name + ")";
    case HostActionKind::kAwait:
      return text + " (await " + sequence_->transfers[current().what].name + ")";
    case HostActionKind::kFree:
      return text + " (free " + sequence_->transfers[current().what].name + ")";
    default:
      return text;
  }
}

Wait SequenceAgent::wait() const {
  Channel& channel = channel_of(current().what);
  if (current().kind == HostActionKind::kTransfer) return {"a place in the queue", {&channel}};
  return {"the token of " + sequence_->transfers[current().what].name, {&channel}};
}

void SequenceAgent::check_complete() const {
  for (std::size_t i = 0; i < tasks_.size(); ++i) {
    if (started_[i] && !tasks_[i].complete) {
      throw Error("[emulator] sequence " + sequence_->name + " has ended, and transfer " +
                  tasks_[i].transfer->name + " is still under way on " + channel_of(i).name());
    }
  }
}

}  // namespace flownpu::emulator
