// SPDX-License-Identifier: Apache-2.0
// DMA channels, and the streams between them.
//
// A stream has one source and any number of sinks, and holds nothing itself: bytes move once the
// source has some to send and every sink has room. Real streams hold some words. A program that
// runs without this room also runs with it.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "aie/emulator/agents/agent.h"
#include "aie/emulator/memories.h"

namespace flownpu::emulator {

class Channel;

struct Stream {
  Channel* source = nullptr;
  std::vector<Channel*> sinks;
};

// A transfer under way. `complete`: all its bytes were moved; `done`: its channel has also finished
// it, which a token reports.
struct Task {
  const Transfer* transfer;
  std::byte* base;
  bool complete = false;
  bool done = false;
};

class Channel final : public Agent {
 public:
  Channel(const ChannelRecord& record, Stream& stream, std::vector<std::unique_ptr<Lock>>& locks,
          Memories& memories, Scheduler& scheduler);

  bool step() override;
  [[nodiscard]] std::string name() const override { return record_->name; }
  [[nodiscard]] Wait wait() const override;

  // A shim tile's channel takes tasks from a sequence, which is woken when one is done.
  void belongs_to(Agent& sequence) { owner_ = &sequence; }
  [[nodiscard]] bool of_shim() const { return record_->descriptors.empty(); }
  [[nodiscard]] std::size_t queued() const { return tasks_.size(); }
  void queue(Task& task);
  // Marks the first task as done and removes it, if all its bytes were moved.
  void finish_task();

  [[nodiscard]] std::uint64_t moved() const { return moved_; }
  void forget_moved() { moved_ = 0; }
  // A text about data that is left when nothing can run any more; empty if there is none.
  [[nodiscard]] std::string leftover() const;

 private:
  enum class State { kNext, kTaking, kMoving, kGiving };

  bool next();
  bool take();
  bool move();
  void give();
  [[nodiscard]] bool moving() const { return state_ == State::kMoving && left_ > 0; }
  void note_moved(std::size_t bytes, const Channel& mover);
  [[nodiscard]] const Descriptor& descriptor() const { return record_->descriptors[next_]; }

  const ChannelRecord* record_;
  Stream* stream_;
  std::vector<std::unique_ptr<Lock>>* locks_;
  Memories* memories_;
  Scheduler* scheduler_;
  State state_ = State::kNext;
  std::size_t next_ = 0;  // the descriptor
  Cursor cursor_;
  std::size_t left_ = 0;
  std::uint64_t moved_ = 0;
  std::vector<Task*> tasks_;
  Agent* owner_ = nullptr;
};

}  // namespace flownpu::emulator
