// SPDX-License-Identifier: Apache-2.0
#include "aie/emulator/agents/channel.h"

#include <algorithm>

namespace flownpu::emulator {
namespace {

constexpr std::size_t kWord = 4;  // bytes that a stream moves at once

}  // namespace

Channel::Channel(const ChannelRecord& record, Stream& stream,
                 std::vector<std::unique_ptr<Lock>>& locks, Memories& memories,
                 Scheduler& scheduler)
    : record_(&record),
      stream_(&stream),
      locks_(&locks),
      memories_(&memories),
      scheduler_(&scheduler) {
  if (record.source) {
    stream.source = this;
  } else {
    stream.sinks.push_back(this);
  }
  for (const Descriptor& d : record.descriptors) {
    Lock& lock = *locks[d.gives];
    const auto& givers = lock.givers();
    if (std::find(givers.begin(), givers.end(), this) == givers.end()) lock.given_by(*this);
  }
}

bool Channel::step() {
  do {
    switch (state_) {
      case State::kNext:
        if (!next()) return false;
        break;
      case State::kTaking:
        if (!take()) return false;
        break;
      case State::kMoving:
        if (!move()) return false;
        break;
      case State::kGiving:
        give();
        break;
    }
  } while (!scheduler_->seeded());
  return true;
}

bool Channel::next() {
  if (!of_shim()) {
    state_ = State::kTaking;
    return true;
  }
  if (tasks_.empty()) return false;
  const Task& task = *tasks_.front();
  cursor_ = Cursor(task.transfer->walk, task.base);
  left_ = task.transfer->walk.bytes();
  state_ = State::kMoving;
  return true;
}

bool Channel::take() {
  const Descriptor& d = descriptor();
  if (!(*locks_)[d.takes]->take(1, *this)) return false;
  cursor_ = Cursor(d.walk, memories_->data(d.memory) + d.offset);
  left_ = d.walk.bytes();
  state_ = State::kMoving;
  return true;
}

// Moves all bytes that can be moved now; returns false if there are none.
bool Channel::move() {
  if (left_ == 0) {
    state_ = State::kGiving;
    return true;
  }
  Channel& source = *stream_->source;
  std::size_t bytes = source.moving() ? source.left_ : 0;
  for (const Channel* sink : stream_->sinks) {
    bytes = sink->moving() ? std::min(bytes, sink->left_) : 0;
  }
  if (bytes == 0) return false;
  if (scheduler_->seeded() && scheduler_->random(2) == 0) {
    bytes = (scheduler_->random(bytes / kWord) + 1) * kWord;
  }
  Cursor after;
  for (Channel* sink : stream_->sinks) {
    after = source.cursor_;
    copy(after, sink->cursor_, bytes);
    sink->note_moved(bytes, *this);
  }
  source.cursor_ = after;
  source.note_moved(bytes, *this);
  return true;
}

void Channel::note_moved(std::size_t bytes, const Channel& mover) {
  left_ -= bytes;
  moved_ += bytes;
  if (left_ > 0) return;
  if (of_shim()) tasks_.front()->complete = true;
  if (this != &mover) scheduler_->wake(*this);
}

void Channel::give() {
  state_ = State::kNext;
  if (of_shim()) {
    finish_task();
    return;
  }
  const Descriptor& d = descriptor();
  if (d.gives_back > 0) Memories::forget(memories_->data(d.memory) + d.offset, d.gives_back);
  next_ = next_ + 1 == record_->descriptors.size() ? 0 : next_ + 1;
  (*locks_)[d.gives]->add(1);
}

void Channel::queue(Task& task) {
  tasks_.push_back(&task);
  scheduler_->wake(*this);
}

void Channel::finish_task() {
  if (tasks_.empty() || !tasks_.front()->complete) return;
  tasks_.front()->done = true;
  tasks_.erase(tasks_.begin());
  state_ = State::kNext;
  scheduler_->wake(*owner_);
}

Wait Channel::wait() const {
  if (state_ == State::kNext) return {"a task", {owner_}};
  if (state_ == State::kTaking) {
    const Lock& lock = *(*locks_)[descriptor().takes];
    return {lock.name() + " (" + std::to_string(lock.value()) + " there)", lock.givers()};
  }
  Wait wait{record_->source ? "room" : "data", {}};
  if (!record_->source && !stream_->source->moving()) wait.givers.push_back(stream_->source);
  for (const Channel* sink : stream_->sinks) {
    if (sink != this && !sink->moving()) wait.givers.push_back(sink);
  }
  const std::string task = of_shim() ? " for transfer " + tasks_.front()->transfer->name : "";
  wait.what += task + ", " + std::to_string(left_) + " bytes more";
  return wait;
}

std::string Channel::leftover() const {
  if (state_ != State::kMoving) return "";
  if (record_->source) return name() + " still has " + std::to_string(left_) + " bytes to send";
  if (of_shim() || left_ == descriptor().walk.bytes()) return "";
  return name() + " has received " + std::to_string(descriptor().walk.bytes() - left_) + " of " +
         std::to_string(descriptor().walk.bytes()) + " bytes";
}

}  // namespace flownpu::emulator
