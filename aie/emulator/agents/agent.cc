// SPDX-License-Identifier: Apache-2.0
#include "aie/emulator/agents/agent.h"

#include <utility>

namespace flownpu::emulator {
namespace {

constexpr std::size_t kRanks = 1 << 20;
// After this many steps on average one agent gets another rank. This happens several times in a
// call of some hundred steps, but seldom enough that an agent can stay behind for most of a call.
constexpr std::size_t kStepsOfRanks = 256;

}  // namespace

void Scheduler::start(std::uint64_t seed, const Agent* last) {
  state_ = seed;
  ranked_ = seed % 2 == 1;
  last_ = last;
  ++run_;
}

std::size_t Scheduler::random(std::size_t count) {
  // splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014).
  state_ += 0x9E3779B97F4A7C15;
  std::uint64_t z = state_;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EB;
  return static_cast<std::size_t>((z ^ (z >> 31)) % count);
}

void Scheduler::wake(Agent& agent) {
  if (agent.ready_) return;
  agent.ready_ = true;
  ready_[(first_ + count_++) % ready_.size()] = &agent;
}

void Scheduler::forget(const Agent& agent) {
  for (std::size_t left = count_; left > 0; --left) {  // once around
    Agent* first = ready_[first_];
    first_ = (first_ + 1) % ready_.size();
    --count_;
    first->ready_ = false;
    if (first != &agent) wake(*first);
  }
}

// Chooses an agent among those that are ready; returns its place in the ring.
std::size_t Scheduler::choose() {
  const auto place = [&](std::size_t i) { return (first_ + i) % ready_.size(); };
  if (!ranked_) {
    const std::size_t chosen = random(count_);
    return place(ready_[place(chosen)] == last_ ? (chosen + 1) % count_ : chosen);
  }
  std::size_t best = first_;
  for (std::size_t i = 0; i < count_; ++i) {
    Agent& agent = *ready_[place(i)];
    if (agent.ranked_in_ != run_) {
      agent.rank_ = &agent == last_ ? 0 : 1 + random(kRanks);
      agent.ranked_in_ = run_;
    }
    if (agent.rank_ > ready_[best]->rank_) best = place(i);
  }
  if (random(kStepsOfRanks) == 0) ready_[best]->ranked_in_ = 0;
  return best;
}

bool Scheduler::run_one() {
  if (count_ == 0) return false;
  if (seeded()) std::swap(ready_[first_], ready_[choose()]);
  Agent& agent = *ready_[first_];
  first_ = (first_ + 1) % ready_.size();
  --count_;
  agent.ready_ = false;
  if (agent.step()) wake(agent);
  return true;
}

void Lock::set(std::int64_t value) {
  if (value < 0 || value > kMost) {
    throw Error("[emulator] the lock of " + name() + " would be " + std::to_string(value) +
                "; it holds 0.." + std::to_string(kMost));
  }
  value_ = value;
  for (Agent* agent : waiting_) scheduler_->wake(*agent);
  waiting_.clear();
}

}  // namespace flownpu::emulator
