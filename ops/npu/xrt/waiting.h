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

// What a Sleeper goes by; tests have a time of their own.
class Time {
 public:
  using Clock = std::chrono::steady_clock;

  virtual ~Time() = default;
  virtual Clock::time_point now() const { return Clock::now(); }
  virtual void sleep(Clock::duration duration);
  static Time& real();
};

// Sleeps between looks at a call: most of the expected time at once, so that waiting takes next to
// no CPU time, then short ones. What they add to a call is in proportion to it; docs/npu.md has the
// numbers, and those of other ways.
class Sleeper {
 public:
  using Clock = Time::Clock;

  // The call begins.
  explicit Sleeper(Expectation& expectation, Time& time = Time::real());
  // Before the next look, and not beyond `until`.
  void sleep(Clock::time_point until);
  // The call has ended.
  void learn() { expectation_.learn(time_.now() - begin_, is_long_); }

 private:
  Expectation& expectation_;
  Time& time_;
  Clock::time_point begin_;
  Expectation::Duration expected_;
  bool is_long_ = false;  // the last sleep
};

// The module's parameter: ms without progress after which a command is ended; 0: never. Only root
// may read it.
inline constexpr const char* kWatchdog = "/sys/module/amdxdna/parameters/tdr_timeout_ms";

// How long a call that makes no progress may stay until the driver's watchdog has ended it. Zero:
// the watchdog is off.
std::chrono::milliseconds watchdog_patience(const std::string& parameter = kWatchdog);

}  // namespace flownpu::npu::xrt_abi
