// SPDX-License-Identifier: Apache-2.0
// The agents that run on the array at the same time, the queue of those that are ready, and locks.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "aie/emulator/program.h"

namespace flownpu::emulator {

class Agent;

// The reason why an agent waits: the event, and the agents that could cause it. Both are empty if
// it has ended.
struct Wait {
  std::string what;
  std::vector<const Agent*> givers;
};

// A core, a DMA channel, or the sequence. It runs until it must wait.
class Agent {
 public:
  Agent() = default;
  Agent(const Agent&) = delete;
  Agent& operator=(const Agent&) = delete;
  virtual ~Agent() = default;

  // Runs until it must wait; with a seed, by one operation only. Returns false if it waits; the
  // agent that changes the awaited state wakes it.
  virtual bool step() = 0;
  [[nodiscard]] virtual std::string name() const = 0;
  // The awaited event; only asked while the agent waits.
  [[nodiscard]] virtual Wait wait() const = 0;

 private:
  friend class Scheduler;
  bool ready_ = false;
  std::size_t rank_ = 0;
  std::uint64_t ranked_in_ = 0;  // the run in which it got its rank, counted from 1; 0: none
};

// Chooses the next agent: with seed 0 in turn, else by a random generator with this seed. Under an
// even seed all agents that are ready are equally likely. Under an odd seed each agent has a rank,
// and the ready one of the highest rank runs, so that some are very late; ranks change now and
// then. Under any seed other than 0 one agent may be the `last`, which runs only if no other can.
class Scheduler {
 public:
  void start(std::uint64_t seed, const Agent* last);
  [[nodiscard]] bool seeded() const { return state_ != 0; }
  // A random number below `count`.
  std::size_t random(std::size_t count);

  void reserve(std::size_t agents) { ready_.resize(agents + 1); }
  // Makes an agent ready, if it is not.
  void wake(Agent& agent);
  // Takes an agent, which is about to be destroyed, out of those that are ready.
  void forget(const Agent& agent);
  // Lets one agent go on; false: none is ready.
  bool run_one();

 private:
  [[nodiscard]] std::size_t choose();

  std::vector<Agent*> ready_;  // a ring
  bool ranked_ = false;
  const Agent* last_ = nullptr;
  std::uint64_t run_ = 0;
  std::size_t first_ = 0;
  std::size_t count_ = 0;
  std::uint64_t state_ = 0;
};

class Lock {
 public:
  // The highest value of a lock, which has six bits (plan/limits.py, lock_maximum).
  static constexpr std::int64_t kMost = 63;

  Lock(const LockRecord& record, Scheduler& scheduler) : record_(&record), scheduler_(&scheduler) {
    set(record.initial);
  }

  // Takes `count` if the value is large enough. Otherwise returns false, and the agent is woken
  // when the value changes.
  bool take(std::int64_t count, Agent& agent) {
    if (value_ < count) return note(agent);
    value_ -= count;
    return true;
  }
  // Whether the value is exactly `value`; it is not changed. If false, the agent is woken when the
  // value changes.
  bool is(std::int64_t value, Agent& agent) { return value_ == value || note(agent); }
  void add(std::int64_t count) { set(value_ + count); }
  void set(std::int64_t value);

  [[nodiscard]] const std::string& name() const { return record_->name; }
  [[nodiscard]] std::int64_t value() const { return value_; }
  [[nodiscard]] const std::vector<const Agent*>& givers() const { return givers_; }
  void given_by(const Agent& agent) { givers_.push_back(&agent); }
  void forget(const Agent& giver) { std::erase(givers_, &giver); }

 private:
  bool note(Agent& agent) {
    waiting_.push_back(&agent);
    return false;
  }

  const LockRecord* record_;
  Scheduler* scheduler_;
  std::int64_t value_ = 0;
  std::vector<Agent*> waiting_;
  std::vector<const Agent*> givers_;
};

}  // namespace flownpu::emulator
