// SPDX-License-Identifier: Apache-2.0
// How a call that is under way is waited for.
//
// XRT's part for NPUs does not say how a wait of its own ended where the driver has given the
// context a timeline (Linux 7): after a time-out, a signal or the loss of the device it goes on as
// if the command had ended. For one command XRT then throws; of a runlist it forgets that it is
// under way. The state that the driver writes into the command's packet is always right. So it is
// what is looked at, between sleeps.
#pragma once

#include <atomic>
#include <chrono>

namespace flownpu::npu::xrt_abi {

// How long a dispatch takes, learnt from those before. A token's take what the last one's did.
class Expectation {
 public:
  using Duration = std::chrono::steady_clock::duration;

  Duration get() const { return expected_; }
  // `overslept`: it had ended at the first look after the long sleep, who knows when.
  void learn(Duration taken, bool overslept);

 private:
  std::atomic<Duration> expected_{};
};

// Sleeps between looks at a call: most of the expected time at once, so that waiting takes next to
// no CPU time, then short ones. What they add to a call is in proportion to it; docs/npu.md has the
// numbers, and those of other ways.
class Sleeper {
 public:
  using Clock = std::chrono::steady_clock;

  explicit Sleeper(Expectation& expectation);
  // Before the next look.
  void sleep(Clock::time_point until);
  // The call has ended.
  void learn() { expectation_.learn(Clock::now() - begin_, is_long_); }

 private:
  Expectation& expectation_;
  Clock::time_point begin_ = Clock::now();
  Expectation::Duration expected_;
  bool is_long_ = false;  // the last sleep
};

// How long a call that makes no progress may stay until the driver's watchdog has ended it. Zero:
// the watchdog is off.
std::chrono::milliseconds watchdog_patience();

}  // namespace flownpu::npu::xrt_abi
